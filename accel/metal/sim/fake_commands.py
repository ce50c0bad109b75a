"""The simulated command queue: command buffers, their execution, events.

Nothing runs before somebody waits, or has polled a few times: so memory that must not change before
it is used will have changed if it can. Dispatches without a barrier between them run in reverse
order."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock

from accel.metal.sim.fake_encoders import (
    READ,
    WRITE,
    Copy,
    Dispatch,
    FakeBlitEncoder,
    FakeCommands,
    FakeComputeEncoder,
    FakeEncoder,
    Pass,
)
from accel.metal.sim.fake_machine import FakeError, Machine
from accel.metal.sim.fake_objc import method

NOT_ENQUEUED, COMMITTED, COMPLETED, FAILED = 0, 2, 4, 5
MAX_IN_FLIGHT = 64
"""Most command buffers of a queue in flight; one more waits for the first to end."""
APPLE9 = 1009
DONE, FAULT = 1, 2
PAGE_FAULT = "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"
INVALID = "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)"
IGNORED = (
    "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
ONE_AT_A_TIME = Lock()
"""A lock, because the process has one handler of faults and a kernel one group memory."""


class GpuError(Exception):
    """A command buffer failed; the message is that of its NSError."""


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
        """The machine of its queue."""
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
        self.queue.in_flight.append(self)

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
        """The queue retains committed buffers, so this one has ended or never will."""
        if self.open is not None:
            self.machine.objc.tell("a command buffer was released with an open encoder")

    def run(self) -> None:
        """Execute everything, or fail as a whole."""
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
        """Nothing of this buffer runs any more."""
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
        """Whether the buffer can be encoded to; records a problem if not."""
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
    """An MTLCommandQueue. Once a buffer ``failed``, later ones of the process are ignored."""

    machine: Machine
    in_flight: deque[FakeCommandBuffer] = field(default_factory=deque)
    failed: bool = False

    @method("commandBuffer", "@@:")
    def command_buffer(self) -> int:
        while len(self.in_flight) >= MAX_IN_FLIGHT and self.advance():
            pass
        buffer = FakeCommandBuffer(self)
        buffer.address = self.machine.pooled("commandBuffer", "MTLCommandBuffer", buffer)
        return buffer.address

    def advance(self) -> bool:
        """Execute the next command buffer, if there is one and the device does not hang."""
        if not self.in_flight or self.machine.behaviour.hangs:
            return False
        buffer = self.in_flight.popleft()
        if self.failed:
            buffer.state, buffer.said = FAILED, IGNORED
            buffer.end()
        else:
            buffer.run()
            self.failed = buffer.state == FAILED
        return True

    def released(self) -> None:
        """Drop what was never executed."""
        for buffer in self.in_flight:
            buffer.end()
        self.in_flight.clear()


def _run(machine: Machine, each: Pass) -> None:
    """Execute one encoder's work; kernels can access only the buffers it uses."""
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
    """The dispatches of commands; those without a barrier between them in reverse order."""
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
    """Devices before the family Apple9 can only use pipelines that were dispatched in the
    encoder."""
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
