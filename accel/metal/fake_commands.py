"""The simulated command queue: command buffers, encoders, commands encoded once, events.

Nothing runs before somebody waits, or has looked a few times: so whatever must not change before it
is used has changed by then. Dispatches without a barrier between them run the last one first.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from accel.metal.fake_machine import FakeBuffer, FakeError, Machine
from accel.metal.fake_objc import method

if TYPE_CHECKING:
    from accel.metal.fake_device import FakePipeline

NOT_ENQUEUED, COMMITTED, COMPLETED, FAILED = 0, 2, 4, 5
READ, WRITE = 1, 2
MOST_UNDER_WAY = 64
"""Command buffers of a queue; one more waits for the first to end."""
MOST_BINDINGS = 31
CONSTANT_ALIGNMENT = 32
COPY_ALIGNMENT = 4
APPLE9 = 1009
DONE, FAULT = 1, 2
PAGE_FAULT = "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"
INVALID = "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)"
IGNORED = (
    "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
ONE_AT_A_TIME = Lock()
"""The process has one handler of faults, and a kernel one memory of a group."""

Size = tuple[int, int, int]


class GpuError(Exception):
    """A command buffer failed; what its NSError says."""


@dataclass(slots=True)
class Dispatch:
    """One dispatch with what is bound at index 0. ``wait`` is a barrier in front of it."""

    pipeline: FakePipeline | None = None
    buffer: FakeBuffer | None = None
    offset: int = 0
    groups: Size = (0, 0, 0)
    items: Size = (0, 0, 0)
    wait: bool = False


@dataclass(slots=True)
class FakeCommand:
    """An MTLIndirectComputeCommand."""

    commands: FakeCommands
    dispatch: Dispatch = field(default_factory=Dispatch)

    @property
    def objc(self) -> Any:
        """The runtime; a command that runs must not change."""
        if self.commands.busy:
            self.commands.machine.objc.tell("commands were changed while they run")
        return self.commands.machine.objc

    @method("setComputePipelineState:", "v@:@")
    def set_pipeline(self, pipeline: int) -> None:
        self.dispatch.pipeline = _pipeline(self.objc, pipeline)

    @method("setKernelBuffer:offset:atIndex:", "v@:@QQ")
    def set_buffer(self, buffer: int, offset: int, index: int) -> None:
        if index >= self.commands.bindings:
            self.objc.tell(f"buffer index {index} of commands that bind {self.commands.bindings}")
        _bind(self.objc, self.dispatch, buffer, offset, index)

    @method("concurrentDispatchThreadgroups:threadsPerThreadgroup:", "v@:{?=QQQ}{?=QQQ}")
    def dispatch_groups(self, groups: Any, items: Any) -> None:
        _set_size(self.objc, self.dispatch, groups, items)
        if not all(self.dispatch.groups):
            self.objc.tell("a dispatch of no groups")

    @method("setBarrier", "v@:")
    def set_barrier(self) -> None:
        _ = self.objc
        self.dispatch.wait = True


@dataclass(slots=True)
class FakeCommands:
    """An MTLIndirectCommandBuffer."""

    machine: Machine
    count: int
    bindings: int
    busy: int = 0
    commands: dict[int, FakeCommand] = field(default_factory=dict)

    @method("indirectComputeCommandAtIndex:", "@@:Q")
    def command(self, index: int) -> int:
        if index >= self.count:
            self.machine.objc.tell(f"command {index} of {self.count}")
            return 0
        command = self.commands.setdefault(index, FakeCommand(self))
        selector = "indirectComputeCommandAtIndex:"
        return self.machine.pooled(selector, "MTLIndirectComputeCommand", command)

    def released(self) -> None:
        """Told when committed commands still need it."""
        if self.busy:
            self.machine.objc.tell("commands were released that committed ones execute")


@dataclass(slots=True)
class Pass:
    """What one encoder encoded: dispatches or copies, and the buffers it has."""

    used: dict[int, tuple[FakeBuffer, int]] = field(default_factory=dict)
    work: list[Dispatch | Copy | tuple[FakeCommands, range]] = field(default_factory=list)
    touched: list[FakePipeline] = field(default_factory=list)

    def use(self, buffer: FakeBuffer, usage: int) -> None:
        """Have a buffer resident, for reads, writes or both."""
        _, before = self.used.get(id(buffer), (buffer, 0))
        self.used[id(buffer)] = buffer, before | usage


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of one buffer to another."""

    source: FakeBuffer
    start: int
    target: FakeBuffer
    offset: int
    nbytes: int


@dataclass(slots=True)
class FakeEncoder:
    """What compute and blit encoders share: they belong to a command buffer until they end."""

    owner: FakeCommandBuffer
    work: Pass
    now: Dispatch = field(default_factory=Dispatch)

    @property
    def objc(self) -> Any:
        """The runtime; after its end an encoder takes nothing."""
        if self.owner.open is not self:
            self.owner.machine.objc.tell("something was encoded behind endEncoding")
        return self.owner.machine.objc

    @method("endEncoding", "v@:")
    def end(self) -> None:
        if self.owner.open is not self:
            self.owner.machine.objc.tell("endEncoding twice")
        else:
            self.owner.open = None

    def released(self) -> None:
        """Metal ends the process here."""
        if self.owner.open is self:
            self.owner.machine.objc.tell("an encoder was released without endEncoding")


class FakeComputeEncoder(FakeEncoder):
    """An MTLComputeCommandEncoder whose dispatches follow one another."""

    @method("useResources:count:usage:", "v@:^@QQ")
    def use(self, resources: int, count: int, usage: int) -> None:
        handles = self.objc.ffi.cast("uint64_t *", resources)
        for index in range(count):
            buffer = self.objc.state(handles[index], FakeBuffer, "a resource")
            if buffer is not None:
                self.work.use(buffer, usage)

    @method("setComputePipelineState:", "v@:@")
    def set_pipeline(self, pipeline: int) -> None:
        self.now.pipeline = _pipeline(self.objc, pipeline)

    @method("setBuffer:offset:atIndex:", "v@:@QQ")
    def set_buffer(self, buffer: int, offset: int, index: int) -> None:
        _bind(self.objc, self.now, buffer, offset, index)
        if self.now.buffer is not None:
            self.work.use(self.now.buffer, READ | WRITE)

    @method("dispatchThreadgroups:threadsPerThreadgroup:", "v@:{?=QQQ}{?=QQQ}")
    def dispatch(self, groups: Any, items: Any) -> None:
        now = self.now
        dispatch = Dispatch(now.pipeline, now.buffer, now.offset, wait=True)
        if now.pipeline is None:
            self.objc.tell("a dispatch without a pipeline")
            return
        _set_size(self.objc, dispatch, groups, items)
        self.work.touched.append(now.pipeline)
        if all(dispatch.groups):
            self.work.work.append(dispatch)

    @method("executeCommandsInBuffer:withRange:", "v@:@{_NSRange=QQ}")
    def execute(self, commands: int, places: Any) -> None:
        found = self.objc.state(commands, FakeCommands, "what is executed")
        if found is None:
            return
        run = range(places.location, places.location + places.length)
        if run.stop > found.count or not run:
            self.objc.tell(f"commands {run.start} to {run.stop} of {found.count}")
        else:
            self.work.work.append((found, run))


class FakeBlitEncoder(FakeEncoder):
    """An MTLBlitCommandEncoder."""

    @method("copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:", "v@:@Q@QQ")
    def copy(self, source: int, start: int, target: int, offset: int, nbytes: int) -> None:
        read = self.objc.state(source, FakeBuffer, "the source of a copy")
        written = self.objc.state(target, FakeBuffer, "the target of a copy")
        if read is None or written is None:
            return
        if any(place % COPY_ALIGNMENT for place in (start, offset, nbytes)):
            self.objc.tell(f"a copy from {start} to {offset} of {nbytes}: all multiples of 4")
        if start + nbytes > read.nbytes or offset + nbytes > written.nbytes:
            self.objc.tell("a copy beyond a buffer's end")
            return
        self.work.use(read, READ)
        self.work.use(written, WRITE)
        self.work.work.append(Copy(read, start, written, offset, nbytes))


@dataclass(slots=True)
class FakeSharedEvent:
    """An MTLSharedEvent."""

    machine: Machine
    value: int = 0
    queues: list[FakeQueue] = field(default_factory=list)

    @method("signaledValue", "Q@:")
    def signaled(self) -> int:
        return self.value

    @method("waitUntilSignaledValue:timeoutMS:", "B@:QQ")
    def wait(self, value: int, milliseconds: int) -> bool:
        for queue in self.queues:
            while self.value < value and queue.advance():
                pass
        if self.value < value:
            time.sleep(milliseconds / 1000)
        return self.value >= value


@dataclass(slots=True)
class FakeCommandBuffer:
    """An MTLCommandBuffer."""

    queue: FakeQueue
    address: int = 0
    state: int = NOT_ENQUEUED
    said: str = ""
    looks: int = 0
    open: FakeEncoder | None = None
    passes: list[Pass] = field(default_factory=list)
    signals: list[tuple[FakeSharedEvent, int]] = field(default_factory=list)

    @property
    def machine(self) -> Machine:
        """Whose it is."""
        return self.queue.machine

    @method("computeCommandEncoder", "@@:")
    def compute_encoder(self) -> int:
        return self._encoder(
            "computeCommandEncoder", "MTLComputeCommandEncoder", FakeComputeEncoder
        )

    @method("blitCommandEncoder", "@@:")
    def blit_encoder(self) -> int:
        return self._encoder("blitCommandEncoder", "MTLBlitCommandEncoder", FakeBlitEncoder)

    @method("encodeSignalEvent:value:", "v@:@Q")
    def signal(self, event: int, value: int) -> None:
        self._encodes("a signal")
        found = self.machine.objc.state(event, FakeSharedEvent, "an event")
        if found is not None:
            self.signals.append((found, value))
            if self.queue not in found.queues:
                found.queues.append(self.queue)

    @method("commit", "v@:")
    def commit(self) -> None:
        if not self._encodes("commit"):
            return
        self.state = COMMITTED
        self.machine.objc.retain(self.address)
        self._keep(1)
        self.queue.under_way.append(self)

    @method("status", "Q@:")
    def status(self) -> int:
        self.looks += 1
        if self.state == COMMITTED and self.looks >= self.machine.behaviour.looks:
            self.queue.advance()
        return self.state

    @method("error", "@@:")
    def error(self) -> int:
        if self.state != FAILED:
            return 0
        objc = self.machine.objc
        return objc.pooled(objc.make("NSError", FakeError(self.machine, self.said)))

    def released(self) -> None:
        """Queues keep what is committed, so by now it has ended or never will."""
        if self.open is not None:
            self.machine.objc.tell("a command buffer was released with an open encoder")

    def run(self) -> None:
        """Do everything, or fail as a whole."""
        self.state = COMPLETED
        try:
            for each in self.passes:
                _run(self.machine, each)
        except GpuError as error:
            self.state, self.said = FAILED, str(error)
        self.end()
        if self.state == COMPLETED:
            for event, value in self.signals:
                event.value = max(event.value, value)

    def end(self) -> None:
        """Nothing of it runs any more."""
        self._keep(-1)
        self.machine.objc.release(self.address)

    def _encoder(self, selector: str, name: str, kind: type[FakeEncoder]) -> int:
        if not self._encodes(selector):
            return 0
        encoder = kind(self, Pass())
        made = self.machine.pooled(selector, name, encoder)
        if made:
            self.open = encoder
            self.passes.append(encoder.work)
        return made

    def _encodes(self, what: str) -> bool:
        """Whether the buffer takes something, which is told where it does not."""
        if self.open is not None:
            self.machine.objc.tell(f"{what} while an encoder is open")
        if self.state != NOT_ENQUEUED:
            self.machine.objc.tell(f"{what} behind commit")
        return self.open is None and self.state == NOT_ENQUEUED

    def _keep(self, number: int) -> None:
        for each in self.passes:
            for buffer, _ in each.used.values():
                buffer.busy += number
            for work in each.work:
                if isinstance(work, tuple):
                    work[0].busy += number


@dataclass(slots=True)
class FakeQueue:
    """An MTLCommandQueue. Once a buffer ``failed`` the others of its process are ignored."""

    machine: Machine
    under_way: deque[FakeCommandBuffer] = field(default_factory=deque)
    failed: bool = False

    @method("commandBuffer", "@@:")
    def command_buffer(self) -> int:
        while len(self.under_way) >= MOST_UNDER_WAY and self.advance():
            pass
        buffer = FakeCommandBuffer(self)
        buffer.address = self.machine.pooled("commandBuffer", "MTLCommandBuffer", buffer)
        return buffer.address

    def advance(self) -> bool:
        """Do the next command buffer, if there is one and the device does anything."""
        if not self.under_way or self.machine.behaviour.hangs:
            return False
        buffer = self.under_way.popleft()
        if self.failed:
            buffer.state, buffer.said = FAILED, IGNORED
            buffer.end()
        else:
            buffer.run()
            self.failed = buffer.state == FAILED
        return True

    def released(self) -> None:
        """What was never done is dropped."""
        for buffer in self.under_way:
            buffer.end()
        self.under_way.clear()


def _pipeline(objc: Any, address: int) -> FakePipeline | None:
    from accel.metal.fake_device import FakePipeline

    found: FakePipeline | None = objc.state(address, FakePipeline, "a pipeline")
    return found


def _bind(objc: Any, dispatch: Dispatch, address: int, offset: int, index: int) -> None:
    buffer = objc.state(address, FakeBuffer, "a bound buffer")
    if index > MOST_BINDINGS - 1 or offset % CONSTANT_ALIGNMENT:
        objc.tell(f"a buffer bound at index {index}, offset {offset}")
    if buffer is not None and offset >= buffer.nbytes:
        objc.tell(f"offset {offset} of a buffer of {buffer.nbytes} bytes")
    elif index == 0:
        dispatch.buffer, dispatch.offset = buffer, offset


def _set_size(objc: Any, dispatch: Dispatch, groups: Any, items: Any) -> None:
    dispatch.groups = groups.width, groups.height, groups.depth
    dispatch.items = items.width, items.height, items.depth
    pipeline = dispatch.pipeline
    threads = dispatch.items[0] * dispatch.items[1] * dispatch.items[2]
    if pipeline is not None and threads > pipeline.items:
        objc.tell(f"{threads} threads of a pipeline for {pipeline.items}")


def _run(machine: Machine, each: Pass) -> None:
    """Do what an encoder encoded; kernels reach the buffers it has and no others."""
    for buffer, usage in each.used.values():
        access = mmap.PROT_READ if usage & READ else 0
        buffer.give(access | (mmap.PROT_READ | mmap.PROT_WRITE if usage & WRITE else 0))
    try:
        for work in each.work:
            if isinstance(work, Copy):
                _copy(machine, work)
            elif isinstance(work, Dispatch):
                _launch(machine, work)
            else:
                _check_pipelines(machine, each, *work)
                for dispatch in _in_any_order(work[0], work[1]):
                    _launch(machine, dispatch)
    finally:
        for buffer, _ in each.used.values():
            buffer.give(0)


def _in_any_order(commands: FakeCommands, run: range) -> Iterator[Dispatch]:
    """The dispatches of commands: those without a barrier between them from the last on."""
    together: list[Dispatch] = []
    for index in run:
        command = commands.commands.get(index)
        if command is None:
            continue
        if command.dispatch.wait:
            yield from reversed(together)
            together = []
        together.append(command.dispatch)
    yield from reversed(together)


def _check_pipelines(machine: Machine, each: Pass, commands: FakeCommands, run: range) -> None:
    """Devices before the family Apple9 know pipelines that were dispatched in the encoder alone."""
    for index in run:
        command = commands.commands.get(index)
        pipeline = command.dispatch.pipeline if command is not None else None
        if pipeline is None or not pipeline.indirect:
            raise GpuError(INVALID)
        if APPLE9 not in machine.behaviour.families and pipeline not in each.touched:
            raise GpuError(INVALID)


def _copy(machine: Machine, copy: Copy) -> None:
    ffi = machine.objc.ffi
    source = machine.objc.pointer(copy.source.device + copy.start)
    target = machine.objc.pointer(copy.target.device + copy.offset)
    ffi.memmove(target, ffi.buffer(source, copy.nbytes), copy.nbytes)


def _launch(machine: Machine, dispatch: Dispatch) -> None:
    objc = machine.objc
    if dispatch.pipeline is None or dispatch.buffer is None:
        raise GpuError(PAGE_FAULT)
    arguments = objc.pointer(dispatch.buffer.device + dispatch.offset)
    groups = dispatch.groups[0] * dispatch.groups[1] * dispatch.groups[2]
    items = dispatch.items[0] * dispatch.items[1] * dispatch.items[2]
    address = objc.ffi.new("void **")
    launch = objc.ffi.cast("void *", dispatch.pipeline.launch)
    with ONE_AT_A_TIME:
        ended = objc.library.fake_run(launch, arguments, groups, items, address)
    if ended == FAULT:
        raise GpuError(f"{PAGE_FAULT} at {int(objc.ffi.cast('uintptr_t', address[0])):#x}")
    if ended != DONE:
        objc.tell("items of a group parted at a barrier")
        raise GpuError("some items of a group met at a barrier that others passed by")
