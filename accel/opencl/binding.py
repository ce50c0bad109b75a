"""OpenCL's objects: contexts, queues, memory, programs, kernels and events.

Each object releases its handle when its last reference is gone. An event holds references to the
memory that its command uses."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from accel.opencl.api import Error, handles, information, number, opencl, text
from accel.opencl.platforms import DeviceHandle, get_platforms
from contract.arrays import Array

__all__ = ["Error", "get_platforms"]

Host: TypeAlias = Array

PROFILING_ENABLE = 1 << 1
READ_WRITE, WRITE_ONLY, READ_ONLY = 1 << 0, 1 << 1, 1 << 2
ALLOC_HOST_PTR, COPY_HOST_PTR = 1 << 4, 1 << 5
COMPLETE, RUNNING = 0, 1
"""Values of an event's status, which is negative when its command failed."""

_PROGRAM_BINARY_SIZES, _PROGRAM_BINARIES = 0x1165, 0x1166
_BUILD_LOG = 0x1183
_EVENT_STATUS = 0x11D3
_STARTED, _ENDED = 0x1282, 0x1283


class BuildFailed(Exception):
    """The compiler rejected a program; ``str`` is the compiler's log."""


class _Owned:
    """Owns the handle of an OpenCL object and releases it."""

    _release: str

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._give_back = getattr(opencl(), self._release)

    def __del__(self) -> None:
        # The attribute is missing when the constructor failed.
        if hasattr(self, "_give_back"):
            self._give_back(self.handle)


class Context(_Owned):
    """A context for the memory and programs of ``devices``. Raises Error."""

    _release = "ReleaseContext"

    def __init__(self, devices: Sequence[DeviceHandle]) -> None:
        self.devices = list(devices)
        ids = handles([device.handle for device in devices])
        super().__init__(opencl().CreateContext(None, len(ids), ids, None, None))


class CommandQueue(_Owned):
    """An in-order queue of ``device``, by default the context's first. Raises Error."""

    _release = "ReleaseCommandQueue"

    def __init__(
        self, context: Context, device: DeviceHandle | None = None, properties: int = 0
    ) -> None:
        self.context = context
        chosen = device or context.devices[0]
        super().__init__(opencl().CreateCommandQueue(context.handle, chosen.handle, properties))
        self._flush = opencl().Flush

    def flush(self) -> None:
        """Send all enqueued commands to the device."""
        self._flush(self.handle)

    def finish(self) -> None:
        """Wait for all enqueued commands."""
        opencl().Finish(self.handle)


class Buffer(_Owned):
    """``nbytes`` of device memory, or as many as ``hostbuf`` has.

    With COPY_HOST_PTR it holds a copy of ``hostbuf``. Raises Error."""

    _release = "ReleaseMemObject"

    def __init__(
        self, context: Context, flags: int, nbytes: int = 0, hostbuf: Host | None = None
    ) -> None:
        address = None if hostbuf is None else _address(hostbuf)
        size = nbytes if hostbuf is None else hostbuf.nbytes
        super().__init__(opencl().CreateBuffer(context.handle, flags, size, address))

    def release(self) -> None:
        """Release the memory now."""
        self._give_back(self.handle)
        del self._give_back


class Program(_Owned):
    """A program from source or binary for the context's only device. Raises Error."""

    _release = "ReleaseProgram"

    def __init__(self, context: Context, text: str | bytes) -> None:
        self._device = context.devices[0].handle
        data = text.encode() if isinstance(text, str) else text
        texts, lengths = (ctypes.c_char_p * 1)(data), (ctypes.c_size_t * 1)(len(data))
        cl = opencl()
        if isinstance(text, str):
            handle = cl.CreateProgramWithSource(context.handle, 1, texts, lengths)
        else:
            device = handles([self._device])
            handle = cl.CreateProgramWithBinary(context.handle, 1, device, lengths, texts, None)
        super().__init__(handle)

    def build(self, options: str) -> Program:
        """Build it and return it. Raises BuildFailed, and Error for other causes."""
        cl = opencl()
        try:
            cl.BuildProgram(self.handle, 1, handles([self._device]), options.encode(), None, None)
        except Error as error:
            log = information(cl.GetProgramBuildInfo, self.handle, self._device, _BUILD_LOG)
            raise BuildFailed(f"{error}\n{text(log)}") from None
        return self

    def binary(self) -> bytes:
        """The binary of the built program."""
        cl = opencl()
        sizes = information(cl.GetProgramInfo, self.handle, _PROGRAM_BINARY_SIZES)
        (nbytes,) = struct.unpack("N", sizes)
        data = ctypes.create_string_buffer(nbytes)
        pointers = handles([ctypes.addressof(data)])
        cl.GetProgramInfo(self.handle, _PROGRAM_BINARIES, ctypes.sizeof(pointers), pointers, None)
        return data.raw


class Kernel(_Owned):
    """A function of a built program, with its own arguments. Raises Error."""

    _release = "ReleaseKernel"

    def __init__(self, program: Program, name: str) -> None:
        super().__init__(opencl().CreateKernel(program.handle, name.encode()))
        self._program = program
        self._set = opencl().SetKernelArg

    def set_args(self, *arguments: Any) -> None:
        """Set all arguments; see ``set_arg``."""
        for index, argument in enumerate(arguments):
            self.set_arg(index, argument)

    def set_arg(self, index: int, argument: Any) -> None:
        """Set one argument: a numpy scalar, a Buffer, or None for no buffer.

        The kernel holds no reference to the buffer. Raises Error."""
        if isinstance(argument, np.generic):
            data = argument.tobytes()
            self._set(self.handle, index, len(data), data)
        else:
            handle = ctypes.c_void_p(None if argument is None else argument.handle)
            self._set(self.handle, index, ctypes.sizeof(handle), ctypes.byref(handle))


class Profile:
    """The begin and the end of a command, in nanoseconds of the device's clock."""

    def __init__(self, event: Event) -> None:
        query = opencl().GetEventProfilingInfo
        self.start, self.end = (
            number(information(query, event.handle, item)) for item in (_STARTED, _ENDED)
        )


class Event(_Owned):
    """The event of a command.

    ``host`` is host memory that the command reads or writes; an event that is deleted before the
    end of its command then waits for the end."""

    _release = "ReleaseEvent"

    def __init__(self, handle: int, host: Host | None = None) -> None:
        super().__init__(handle)
        cl = opencl()
        self._host = host
        self._wait_for, self._ask = cl.WaitForEvents, cl.GetEventInfo
        self._status = ctypes.c_int()

    @property
    def command_execution_status(self) -> int:
        """COMPLETE, more before the end, or less than 0 after a failure. Raises Error."""
        status = self._status
        self._ask(self.handle, _EVENT_STATUS, 4, ctypes.byref(status), None)
        return status.value

    @property
    def profile(self) -> Profile:
        """The times of a command that has ended, in a queue with PROFILING_ENABLE. Raises Error."""
        return Profile(self)

    def wait(self) -> None:
        """Wait for the end of the command. Raises Error when it failed."""
        self._wait_for(1, handles([self.handle]))
        self._host = None

    def __del__(self) -> None:
        if getattr(self, "_host", None) is not None:
            try:
                self.wait()
            except Error:
                # The command has ended; its status reports the failure.
                self._host = None
        super().__del__()


def enqueue_nd_range_kernel(
    queue: CommandQueue, kernel: Kernel, items: tuple[int], group: tuple[int] | None
) -> Event:
    """Start ``items`` work-items in groups of ``group``; the driver chooses the size for None."""
    made = ctypes.c_void_p()
    local = None if group is None else (ctypes.c_size_t * 1)(*group)
    opencl().EnqueueNDRangeKernel(
        queue.handle,
        kernel.handle,
        1,
        None,
        (ctypes.c_size_t * 1)(*items),
        local,
        0,
        None,
        ctypes.byref(made),
    )
    return _event(made)


def prepared_launch(
    queue: CommandQueue, kernel: Kernel, items: int, group: int | None
) -> Callable[[], Any]:
    """A function that starts ``items`` work-items at each call.

    It is faster than ``enqueue_nd_range_kernel`` because it creates no event. The caller keeps
    ``queue`` and ``kernel`` alive."""
    local = None if group is None else (ctypes.c_size_t * 1)(group)
    return functools.partial(
        opencl().EnqueueNDRangeKernel,
        ctypes.c_void_p(queue.handle),
        ctypes.c_void_p(kernel.handle),
        1,
        None,
        (ctypes.c_size_t * 1)(items),
        local,
        0,
        None,
        None,
    )


def enqueue_copy(
    queue: CommandQueue,
    target: Buffer | Host,
    source: Buffer | Host,
    *,
    src_offset: int = 0,
    dst_offset: int = 0,
    is_blocking: bool = True,
) -> Event:
    """Copy an array into a buffer at ``dst_offset``, or fill an array from a buffer at
    ``src_offset``. Raises Error."""
    made = ctypes.c_void_p()
    cl = opencl()
    if isinstance(target, Buffer):
        assert not isinstance(source, Buffer)
        call, buffer, host, offset = cl.EnqueueWriteBuffer, target, source, dst_offset
    else:
        assert isinstance(source, Buffer)
        call, buffer, host, offset = cl.EnqueueReadBuffer, source, target, src_offset
    call(
        queue.handle,
        buffer.handle,
        is_blocking,
        offset,
        host.nbytes,
        _address(host),
        0,
        None,
        ctypes.byref(made),
    )
    return _event(made, None if is_blocking else host)


def enqueue_fill_buffer(
    queue: CommandQueue, buffer: Buffer, pattern: Host, offset: int, nbytes: int
) -> Event:
    """Repeat ``pattern`` in ``nbytes`` of a buffer. Raises Error."""
    made = ctypes.c_void_p()
    opencl().EnqueueFillBuffer(
        queue.handle,
        buffer.handle,
        _address(pattern),
        pattern.nbytes,
        offset,
        nbytes,
        0,
        None,
        ctypes.byref(made),
    )
    return _event(made)


def enqueue_marker(queue: CommandQueue) -> Event:
    """An event at the end of all commands enqueued before. Raises Error."""
    made = ctypes.c_void_p()
    opencl().EnqueueMarkerWithWaitList(queue.handle, 0, None, ctypes.byref(made))
    return _event(made)


def _event(made: Any, host: Host | None = None) -> Event:
    return Event(made.value, host)


def _address(array: Host) -> int:
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])
