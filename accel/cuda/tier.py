"""The CUDA tier: a graph becomes packets, and a step one CUDA graph of kernels that read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.buffers import CudaBuffer, Weights
from accel.cuda.device import TIER, Device
from accel.cuda.driver import CudaError, open_driver
from accel.cuda.launcher import BoundLaunch, LaunchShape, Recording
from accel.cuda.memory import Allocation
from accel.cuda.persistent import Block, compose
from accel.cuda.plan import (
    PLAIN_LAYOUTS,
    Plan,
    PlannedLaunch,
    plain_ops,
    plan_launches,
    sources_of,
)
from accel.cuda.program import Compiler, Source
from accel.cuda.registered import cuda_forms
from accel.cuda.runtime import Choices, open_runtime
from accel.cuda.submissions import CudaBatch, CudaFence, Submissions
from accel.packets.binding import bind_step, product_factors
from accel.packets.buffers import matrices_of, outputs_of
from accel.packets.build import Progress
from accel.packets.footprint import device_footprint, step_memory
from accel.packets.layouts import WeightLayout
from accel.packets.mirrors import exchange_as
from accel.packets.places import Places, grown
from accel.packets.rules import OPCODES, ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_launches
from accel.packets.step import Schedule, Step
from accel.packets.under_way import DEFAULT_TIMEOUT_SECONDS, Waiting
from contract.arithmetic import ARITHMETIC_VERSION
from contract.closing import Closing
from contract.errors import CodecError, DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows, input_layout
from contract.ir.nodes import BufferDecl, Graph
from contract.kernel import GpuTarget, KernelHeader, decode_kernel
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, Heap, TierInfo, check_range


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel file whose code is CUDA C++, built for this device."""

    header: KernelHeader
    function: Any


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a graph was found to take, kept for when it is then made."""

    graph: Graph
    largest: ShapeKey
    footprint: Footprint
    scratch_bytes: int
    factors: frozenset[str]
    """Buffers some product reads: those that are arranged when they are uploaded."""
    lowered: Mapping[ShapeKey, tuple[Step, Schedule, Plan]]


class CudaTier(Closing):
    """See ``contract.tier.Tier``. ``device`` is part of a device's name.

    Raises TierUnavailable when there is no such device, and what ``open_runtime`` raises.
    ``progress`` is called with a line before kernels are compiled. ``binding`` and ``compiler``
    stand in for the driver and NVRTC.
    """

    def __init__(
        self,
        device: str = "",
        choices: Choices | None = None,
        progress: Progress | None = None,
        binding: Any = None,
        compiler: Compiler | None = None,
    ) -> None:
        driver = open_driver(binding)
        self._runtime = open_runtime(driver, device, choices or Choices(), progress, compiler)
        self._memory = self._runtime.memory
        self._weights = Weights(self._runtime)
        self._buffers: set[CudaBuffer] = set()
        self._scratch: Allocation | None = None
        self._places = Places()
        self._submissions = Submissions(self._memory)
        self._waiting = Waiting()
        self._planned: _Planned | None = None
        self._lost = ""
        self._closed = False

    @property
    def info(self) -> TierInfo:
        """The device, its driver and the compiler."""
        device = self._runtime.device
        return TierInfo(
            name=TIER,
            device=device.name,
            driver=f"CUDA {device.driver_text}, NVRTC {self._runtime.compiler}",
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=OPCODES,
            memory_bytes=device.memory_bytes,
            host_unified=False,
            asynchronous=True,
        )

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the device."""
        return self._memory.held

    @property
    def available_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        with self._guarded("asking for free memory"):
            return self._memory.available

    def forms(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return cuda_forms(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        return self._plan_graph(graph, largest).footprint

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make the scratch memory and the place of a step's inputs."""
        planned = self._plan_graph(graph, largest)
        with self._guarded("reserving memory"):
            self._reserve(planned.scratch_bytes, input_layout(graph, largest).nbytes)

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> CudaBuffer:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        with self._guarded(f"allocating {decl.name}"):
            allocation = self._memory.allocate(decl.name, nbytes)
        exchange_as(allocation, decl)
        return self._keep(CudaBuffer(decl, nbytes, heap, allocation))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> CudaBuffer:
        """A copy of ``data``, arranged for the products if it is one of their matrices.

        ``data`` is read until the first graph is lowered. Raises OutOfMemory before copying.
        """
        buffer = CudaBuffer(decl, data.nbytes, Heap.DEVICE_LOCAL, source=data)
        with self._guarded(f"uploading {decl.name}"):
            if matrices_of(decl) and (self._planned is None or decl.name in self._planned.factors):
                self._weights.matrix(buffer)
            else:
                self._weights.stored(buffer)
        return self._keep(buffer)

    def free(self, buffer: CudaBuffer) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        self._buffers.remove(buffer)
        if not self._lost:
            with self._guarded(f"freeing {buffer.name}"):
                self._runtime.uploader.finish()
                for allocation in buffer.allocations:
                    self._memory.free(allocation)

    def map(self, buffer: CudaBuffer) -> NDArray[np.uint8]:
        """The bytes in host memory; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        assert buffer.allocation is not None
        with self._guarded(f"mapping {buffer.name}"):
            return self._memory.mirrors.map(buffer.allocation)

    def read(self, buffer: CudaBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        assert buffer.allocation is not None
        with self._guarded(f"reading {buffer.name}"):
            return self._memory.mirrors.read(buffer.allocation, offset, nbytes)

    def write(self, buffer: CudaBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        assert buffer.allocation is not None
        with self._guarded(f"writing {buffer.name}"):
            self._memory.mirrors.write(buffer.allocation, offset, data)

    def load_kernel(self, blob: bytes) -> CudaKernel:
        """Build a ``.zrt`` file of CUDA C++ source that defines a kernel of its name."""
        header = decode_kernel(blob)
        if header.target is not GpuTarget.CUDA_C:
            raise CodecError(f"kernel {header.name}: target {header.target.name}, not CUDA_C")
        try:
            text = header.code.decode()
        except UnicodeDecodeError as error:
            raise CodecError(f"kernel {header.name}: source is not UTF-8 ({error})") from None
        with self._guarded(f"loading kernel {header.name}"):
            function = self._runtime.modules.function(Source(header.name, text), header.name)
        return CudaKernel(header, function)

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, CudaBuffer],
        form: ShapeKey,
        inputs: InputLayout,
    ) -> CudaBatch:
        """Launches of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        with self._guarded(f"lowering {graph.name}"):
            step, schedule, plan = self._lowered(graph, form)
            self._runtime.modules.prepare(sources_of(plan))
            self._reserve(schedule.shared_bytes, inputs.nbytes)
            packets = bind_step(
                step,
                schedule,
                inputs,
                lambda name: self._weights.stored(buffers[name]).address,
                lambda name: self._weights.matrix(buffers[name]).operand,
            )
            _check_layouts(step, packets, plan)
            self._runtime.uploader.close()
            outputs = outputs_of(graph, lambda name: self._weights.stored(buffers[name]))
            recording = self._recorded(graph.name, plan, packets)
            recording.prepare(self._memory.stream)
        return CudaBatch(form, len(plan.launches), recording, inputs.nbytes, outputs)

    def submit(
        self,
        batch: CudaBatch,
        inputs: NDArray[np.uint8],
        wanted: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> CudaFence:
        """Enqueue the step. Raises DeviceLost once the device has failed."""
        with self._guarded("submitting a step"):
            return self._submissions.submit(batch, inputs, wanted, rows)

    def wait(self, fence: CudaFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if fence.done or self._waiting.until_done(fence, seconds):
                return
        self._runtime.abandon()
        raise self._fail(f"a step did not end within {seconds:g} s")

    def close(self) -> None:
        """Wait for the device, then free all buffers."""
        if self._closed:
            return
        self._closed = True
        self._submissions.close()
        self._buffers.clear()
        if not self._lost:
            with self._guarded("closing"):
                self._runtime.close()

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Raises DeviceLost when the device has failed, before or meanwhile."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            yield
        except (CudaError, DeviceLost) as error:
            self._runtime.give_up()
            raise self._fail(f"{what} failed: {error}") from None

    def _fail(self, reason: str) -> DeviceLost:
        self._lost = f"{self._runtime.device.name}: {reason}"
        return DeviceLost(self._lost)

    def _keep(self, buffer: CudaBuffer) -> CudaBuffer:
        self._buffers.add(buffer)
        return buffer

    def _recorded(self, name: str, plan: Plan, packets: NDArray[np.void]) -> Recording:
        memory, runtime = self._memory, self._runtime
        kept, workspace = [], 0
        if plan.workspace_bytes:
            kept.append(memory.allocate(f"workspace of {name}", plan.workspace_bytes))
            workspace = kept[0].address
        launches = []
        for launch in plan.launches:
            replaced = packets[launch.first : launch.first + launch.count]
            own: tuple[np.generic, ...] = (np.void(replaced.tobytes()),)
            if launch.table is not None:
                assert runtime.stop is not None
                table = launch.table.bound(packets, runtime.stop.address)
                kept.append(memory.adopt(f"phases of {name}", table))
                own = (np.uint64(kept[-1].address),)
            if launch.workspace is not None:
                own = (*own, np.uint64(workspace + launch.workspace))
            launches.append(BoundLaunch(self._shape(launch), launch.cooperative, own))
        recording = Recording(
            runtime.context, launches, self._places, runtime.programmatic, runtime.graphs
        )
        weakref.finalize(recording, _give_back, memory, kept)
        return recording

    def _shape(self, launch: PlannedLaunch) -> LaunchShape:
        runtime = self._runtime
        function = runtime.modules.function(launch.source, launch.entry)
        if launch.shared_bytes:
            attributes = runtime.context.binding.CUfunction_attribute
            most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            # A kernel has one limit for all its launches.
            limit = runtime.device.shared_bytes
            runtime.context.call("cuFuncSetAttribute", function, most, limit)
        return LaunchShape(function, launch.grid, launch.block, launch.shared_bytes)

    def _plan_graph(self, graph: Graph, largest: ShapeKey) -> _Planned:
        planned = self._planned
        if planned is None or (planned.graph, planned.largest) != (graph, largest):
            planned = self._planned = self._looked_at(graph, largest)
        return planned

    def _looked_at(self, graph: Graph, largest: ShapeKey) -> _Planned:
        device = self._runtime.device
        blocks = self._runtime.blocks
        lowered = {form: _scheduled(graph, form, device, blocks) for form in cuda_forms(largest)}
        steps = step_memory(lambda form: lowered[form][:2], largest, cuda_forms)
        factors = frozenset().union(*(product_factors(step) for step, _, _ in lowered.values()))
        workspaces = sum(plan.memory_bytes for _, _, plan in lowered.values())

        def arranged(decl: BufferDecl) -> int:
            return self._weights.arranged_bytes(decl) if decl.name in factors else 0

        footprint = device_footprint(graph, largest, steps, arranged, workspaces)
        return _Planned(graph, largest, footprint, steps.shared, factors, lowered)

    def _lowered(self, graph: Graph, form: ShapeKey) -> tuple[Step, Schedule, Plan]:
        """As planned, if it was."""
        planned = self._planned
        if planned is not None and planned.graph == graph and form in planned.lowered:
            return planned.lowered[form]
        return _scheduled(graph, form, self._runtime.device, self._runtime.blocks)

    def _reserve(self, scratch_bytes: int, input_bytes: int) -> None:
        """Grow what steps share; batches lowered before follow it."""
        self._scratch = self._grown("scratch", self._scratch, scratch_bytes)
        self._places.move(self._scratch.address, self._places.inputs)
        place = self._grown("inputs of a step", self._submissions.place, input_bytes)
        self._submissions.place = place
        self._places.move(self._scratch.address, place.address)

    def _grown(self, what: str, current: Allocation | None, nbytes: int) -> Allocation:
        return grown(self._memory, self._memory.synchronize, what, current, nbytes)


def _scheduled(
    graph: Graph, form: ShapeKey, device: Device, blocks: Sequence[Block] = ()
) -> tuple[Step, Schedule, Plan]:
    step = lower_graph(graph, form, ROW_PARTS, TIER)
    tuned = plan_launches(step.ops, device, step.scratch)
    plan = compose(tuned, step.ops, device, blocks, step.scratch)
    return step, schedule_launches(step, plan.levels, plan.together), plan


def _check_layouts(step: Step, packets: NDArray[np.void], plan: Plan) -> None:
    """A tuned layout without a tuned kernel would be read wrongly."""
    for index in plain_ops(plan):
        layout = WeightLayout(packets["layout"][index])
        name = step.ops[index].name
        assert layout in PLAIN_LAYOUTS, f"no rule for {name} of weights arranged as {layout.name}"


def _give_back(memory: Any, allocations: list[Allocation]) -> None:
    if not memory.context.closed:
        for allocation in allocations:
            memory.free(allocation)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[CudaBuffer, CudaBatch, CudaFence]] = CudaTier
