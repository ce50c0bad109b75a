"""A test double of ``cuda.bindings.driver``: a device made of host memory.

Enqueued work runs only when somebody waits or asks, as on the slowest possible device, so memory
that is overwritten, freed or forgotten too early shows. ``fake_kernels`` says what a kernel does;
its source is not compiled. It proves the tier's own logic (memory, order, errors), not a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.packets.packet import ALIGNMENT
from tests.cuda.fake_context import (
    SUCCESS,
    TURN,
    Capture,
    CapturedRecord,
    CapturedWait,
    CUresult,
    EventWait,
    FakeContext,
    FakeEvent,
    Thread,
)
from tests.cuda.fake_kernels import KERNELS

QUERIES_PER_OPERATION = 5
FIRST_STREAM = 1
"""Of a context, and the only one with kernels, which run when somebody waits."""
UNASKED_SHARED_BYTES = 48 << 10
"""Dynamic shared memory a kernel may have without asking for more."""
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 4,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MPS_ENABLED": 0,
}


class FakeDriver:
    """The functions of the binding the tier calls. ``calls`` are their names in order."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        **{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in ATTRIBUTES}
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative",
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="programmatic",
    )
    CUlaunchConfig = SimpleNamespace
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, memory_bytes: int = 1 << 28, version: int = 13000, **attributes: int):
        self.memory_bytes = memory_bytes
        self.version = version
        self.attributes = {**ATTRIBUTES, **attributes}
        self.devices = 1
        self.device_name = b"Fake device"
        self._thread = Thread()
        self.calls: list[str] = []
        self.launched: list[tuple[str, list[Any]]] = []
        self.kernels = dict(KERNELS)
        self.shared_limits: dict[str, int] = {}
        self.refused_images: set[bytes] = set()
        self.faulted = SUCCESS

    @staticmethod
    def CUlaunchAttribute() -> Any:
        return SimpleNamespace(id=None, value=SimpleNamespace())

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("cu") and name[2].isupper():
            self.calls.append(name)
            needs = name not in CONTEXTLESS and not name.startswith("cuDevice")
            if needs and self.current.destroyed:
                return lambda *_: (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
            if needs and self.current.error:
                return lambda *_: (self.current.error,)
            if name in MAY_WAIT and self._thread.captures is not None:
                self._thread.captures.broken = True
                return lambda *_: (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None)
        return value

    @property
    def current(self) -> FakeContext:
        """That of the thread that asks: it has none until it chooses one."""
        return self._thread.current

    @current.setter
    def current(self, context: FakeContext) -> None:
        self._thread.current = context

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (SUCCESS if self.devices else CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return SUCCESS, self.version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return SUCCESS, self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return SUCCESS, self.device_name + b"\0"

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return SUCCESS, self.memory_bytes

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Any, ...]:
        return SUCCESS, self.attributes[name]

    def cuCtxCreate(self, parameters: None, flags: int, device: int) -> tuple[Any, ...]:
        if self.faulted:
            return self.faulted, None
        self.current = self.new_context(device)
        return SUCCESS, self.current

    def new_context(self, device: int) -> FakeContext:
        """One on a device."""
        return FakeContext()

    def cuCtxSetCurrent(self, context: FakeContext) -> tuple[Any, ...]:
        self.current = context
        return (SUCCESS,)

    def cuCtxPushCurrent(self, context: FakeContext) -> tuple[Any, ...]:
        self._thread.covered.append(self.current)
        self.current = context
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        popped, self.current = self.current, self._thread.covered.pop()
        return SUCCESS, popped

    def cuCtxDestroy(self, context: FakeContext) -> tuple[Any, ...]:
        if self.faulted:
            return (self.faulted,)
        assert not context.hangs, "destroying a context whose kernel hangs never returns"
        context.destroyed = True
        context.memory.clear()
        return (SUCCESS,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        used = sum(len(block) for block in self.current.blocks.values())
        return SUCCESS, self.memory_bytes - used, self.memory_bytes

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        _, free, _ = self.cuMemGetInfo()
        if nbytes > free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        room = (ctypes.c_uint8 * (nbytes + ALIGNMENT))()
        start = -ctypes.addressof(room) % ALIGNMENT
        block = (ctypes.c_uint8 * nbytes).from_buffer(room, start)
        ctypes.memset(block, 0xA5, nbytes)
        self.current.memory[ctypes.addressof(block)] = block
        return SUCCESS, ctypes.addressof(block)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.current.run()
        del self.current.memory[address]
        return (SUCCESS,)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        self.current.pinned.update(range(address, address + nbytes, 4096))
        return (SUCCESS,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        if address not in self.current.pinned:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return SUCCESS, address

    def cuMemsetD32Async(
        self, address: int, value: int, count: int, stream: Any
    ) -> tuple[Any, ...]:
        assert value == 0
        return self._enqueue(lambda: ctypes.memset(address, 0, 4 * count))

    def cuMemcpyHtoDAsync(
        self, target: int, source: int, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        self._on_device(target, nbytes)
        if source // 4096 * 4096 in self.current.pinned:
            return self._enqueue(lambda: ctypes.memmove(target, source, nbytes), stream)
        staged = ctypes.string_at(source, nbytes)
        return self._enqueue(lambda: ctypes.memmove(target, staged, nbytes), stream)

    def cuMemcpyDtoHAsync(
        self, target: int, source: int, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        self._on_device(source, nbytes)
        answer = self._enqueue(lambda: ctypes.memmove(target, source, nbytes), stream)
        if target // 4096 * 4096 not in self.current.pinned:
            self.current.run()
        return answer

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        self.current.streams += 1
        return SUCCESS, self.current.streams

    def cuStreamQuery(self, stream: Any) -> tuple[Any, ...]:
        self.current.run()
        return (CUresult.CUDA_ERROR_NOT_READY if self.current.queue else SUCCESS,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        self.current.run()
        return (self.current.error,)

    def cuStreamBeginCapture(self, stream: Any, mode: int) -> tuple[Any, ...]:
        self.current.graph = Capture()
        self._thread.captures = self.current.graph
        return (SUCCESS,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        graph, self.current.graph = self.current.graph, None
        self._thread.captures = None
        if graph.broken:
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        if not graph.joined(FIRST_STREAM):
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, None
        return SUCCESS, graph

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        return SUCCESS, list(graph)

    def cuGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        graph.clear()
        return (SUCCESS,)

    def cuGraphExecDestroy(self, executable: Any) -> tuple[Any, ...]:
        return (SUCCESS,)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[Any, ...]:
        events: dict[int, FakeEvent] = {}
        for of_stream, operation in executable:
            if isinstance(operation, CapturedRecord):
                self.cuEventRecord(events.setdefault(id(operation.event), FakeEvent()), of_stream)
            elif isinstance(operation, CapturedWait):
                self.cuStreamWaitEvent(of_stream, events[id(operation.event)], 0)
            else:
                self._enqueue(operation, of_stream)
        return (SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return SUCCESS, FakeEvent()

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        return (SUCCESS,)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:
        if self._captures(stream):
            return self._enqueue(CapturedRecord(event), stream)
        event.recorded += 1
        return self._enqueue(event.reach, stream)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any, ...]:
        graph = self.current.graph
        if graph is not None and graph.records(event):
            graph.append((stream, CapturedWait(event)))
            return (SUCCESS,)
        if self._captures(stream):
            return (CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,)
        return self._enqueue(EventWait(event, event.recorded), stream)

    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:
        """The device gets on only while somebody asks again and again."""
        self.current.asked += 1
        if self.current.asked % QUERIES_PER_OPERATION == 0:
            self.current.run(1)
        if self.current.error:
            return (self.current.error,)
        return (SUCCESS if event.passed else CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: Any) -> tuple[Any, ...]:
        self.current.run()
        return (self.current.error,)

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        if image in self.refused_images:
            return CUresult.CUDA_ERROR_INVALID_IMAGE, None
        return SUCCESS, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        if name.decode() not in self.kernels:
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        return SUCCESS, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> tuple[Any, ...]:
        self.shared_limits[function] = value
        return (SUCCESS,)

    def cuLaunchKernel(self, function: Any, *given: Any) -> tuple[Any, ...]:
        names = [f"{kind}Dim{axis}" for kind in ("grid", "block") for axis in "XYZ"]
        *numbers, stream, arguments, extra = given
        config = SimpleNamespace(
            **dict(zip([*names, "sharedMemBytes"], numbers, strict=True)), hStream=stream, attrs=[]
        )
        return self.cuLaunchKernelEx(config, function, arguments, extra)

    def cuLaunchKernelEx(
        self, config: Any, function: str, arguments: int, extra: int
    ) -> tuple[Any, ...]:
        if config.sharedMemBytes > self.shared_limits.get(function, UNASKED_SHARED_BYTES):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        sizes, kernel = self.kernels[function]
        places = np.ctypeslib.as_array((ctypes.c_uint64 * len(sizes)).from_address(arguments))
        values = [
            int.from_bytes(ctypes.string_at(int(place), size), "little")
            for place, size in zip(places, sizes, strict=True)
        ]
        self.launched.append((function, [attribute.id for attribute in config.attrs]))
        return self._enqueue(lambda: kernel(self, *values))

    def _enqueue(self, operation: Callable[[], Any], stream: Any = FIRST_STREAM) -> tuple[Any, ...]:
        context = self.current
        if context.graph is not None and context.graph.takes(stream, FIRST_STREAM):
            context.graph.append((stream, operation))
        elif stream != FIRST_STREAM:
            with TURN:
                context.aside.setdefault(stream, []).append(operation)
                while not context.late and context.advance_aside():
                    pass
        else:
            context.queue.append(operation)
        return (SUCCESS,)

    def _captures(self, stream: Any) -> bool:
        graph = self.current.graph
        return graph is not None and graph.takes(stream, FIRST_STREAM)

    def _on_device(self, address: int, nbytes: int) -> None:
        blocks = self.current.blocks.items()
        assert any(a <= address and address + nbytes <= a + len(b) for a, b in blocks), "not ours"


MAY_WAIT = {
    *("cuCtxDestroy", "cuMemAlloc", "cuMemFree", "cuMemHostRegister", "cuModuleLoadData"),
    *("cuStreamQuery", "cuStreamSynchronize", "cuEventQuery", "cuEventSynchronize"),
}
CONTEXTLESS = {
    *("cuInit", "cuDriverGetVersion", "cuCtxCreate", "cuCtxDestroy"),
    *("cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"),
}
