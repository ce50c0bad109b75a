"""The simulated encoders and indirect commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from accel.metal.sim.fake_machine import FakeBuffer, Machine
from accel.metal.sim.fake_objc import method

READ, WRITE = 1, 2
MAX_BINDINGS = 31
CONSTANT_ALIGNMENT = 32
COPY_ALIGNMENT = 4

Size = tuple[int, int, int]


@dataclass(slots=True)
class FakePipeline:
    """An MTLComputePipelineState: ``launch`` is the C++ of its kernel."""

    machine: Machine
    launch: Any
    items: int
    indirect: bool

    @method("maxTotalThreadsPerThreadgroup", "Q@:")
    def max_items(self) -> int:
        return self.items


@dataclass(slots=True)
class Dispatch:
    """One dispatch with what is bound at index 0. ``wait`` is a barrier before it."""

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
        """The runtime; records a problem if the command changes while it runs."""
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
        """Record a problem if committed commands still need these."""
        if self.busy:
            self.machine.objc.tell("commands were released that committed ones execute")


@dataclass(slots=True)
class Pass:
    """The work that one encoder encoded: dispatches or copies, and the buffers it uses."""

    used: dict[int, tuple[FakeBuffer, int]] = field(default_factory=dict)
    work: list[Dispatch | Copy | tuple[FakeCommands, range]] = field(default_factory=list)
    touched: list[FakePipeline] = field(default_factory=list)

    def use(self, buffer: FakeBuffer, usage: int) -> None:
        """Use a buffer, for reads, writes or both."""
        _, before = self.used.get(id(buffer), (buffer, 0))
        self.used[id(buffer)] = buffer, before | usage


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of bytes from one buffer to another."""

    source: FakeBuffer
    start: int
    target: FakeBuffer
    offset: int
    nbytes: int


class EncoderOwner(Protocol):
    """The command buffer of an encoder; only one encoder is ``open`` at a time."""

    open: FakeEncoder | None

    @property
    def machine(self) -> Machine:
        """The machine of the command buffer."""


@dataclass(slots=True)
class FakeEncoder:
    """The common part of compute and blit encoders, which belong to a command buffer until they
    end."""

    owner: EncoderOwner
    work: Pass
    now: Dispatch = field(default_factory=Dispatch)

    @property
    def objc(self) -> Any:
        """The runtime; records a problem if something is encoded after the end."""
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
        """Record a problem where Metal would end the process."""
        if self.owner.open is self:
            self.owner.machine.objc.tell("an encoder was released without endEncoding")


class FakeComputeEncoder(FakeEncoder):
    """An MTLComputeCommandEncoder whose dispatches run in order."""

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
    def execute(self, commands: int, ns_range: Any) -> None:
        found = self.objc.state(commands, FakeCommands, "what is executed")
        if found is None:
            return
        run = range(ns_range.location, ns_range.location + ns_range.length)
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
        if any(value % COPY_ALIGNMENT for value in (start, offset, nbytes)):
            self.objc.tell(f"a copy from {start} to {offset} of {nbytes}: all multiples of 4")
        if start + nbytes > read.nbytes or offset + nbytes > written.nbytes:
            self.objc.tell("a copy beyond a buffer's end")
            return
        self.work.use(read, READ)
        self.work.use(written, WRITE)
        self.work.work.append(Copy(read, start, written, offset, nbytes))


def _pipeline(objc: Any, address: int) -> FakePipeline | None:
    found: FakePipeline | None = objc.state(address, FakePipeline, "a pipeline")
    return found


def _bind(objc: Any, dispatch: Dispatch, address: int, offset: int, index: int) -> None:
    buffer = objc.state(address, FakeBuffer, "a bound buffer")
    if index > MAX_BINDINGS - 1 or offset % CONSTANT_ALIGNMENT:
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
