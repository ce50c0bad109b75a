"""An open device: context, a queue of recorded command lists, an immediate list, and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from accel.intel.api import LevelZero
from accel.intel.device import Device
from contract.context_manager import ContextManager
from contract.errors import DeviceLost

PATIENCE_SECONDS = 600.0
"""Longest that memory operations wait for the device."""
MAX_NANOSECONDS = (1 << 63) - 1

Append = Callable[..., None]


class Queue:
    """The only queue of ``device``, which executes command lists in the order of submission.

    ``immediate`` is a command list whose commands begin at once. Raises LevelZeroError when they
    cannot be made."""

    def __init__(self, zero: LevelZero, device: Device) -> None:
        self.zero = zero
        self.device = device
        with ExitStack() as undo:
            description = zero.structure("context_desc")
            self.context = zero.create(
                "ContextCreate", "context", device.driver_handle, description
            )
            undo.callback(zero.call, "ContextDestroy", self.context)
            asynchronous = zero.structure(
                "command_queue_desc",
                ordinal=device.ordinal,
                mode=zero.constant("COMMAND_QUEUE_MODE_ASYNCHRONOUS"),
            )
            owner = self.context, device.handle, asynchronous
            self.handle = zero.create("CommandQueueCreate", "command_queue", *owner)
            undo.callback(zero.call, "CommandQueueDestroy", self.handle)
            self.immediate = zero.create("CommandListCreateImmediate", "command_list", *owner)
            undo.callback(zero.call, "CommandListDestroy", self.immediate)
            self._copied = undo.enter_context(Events(self, 1))
            self._open: ExitStack | None = undo.pop_all()

    def submit(self, lists: Sequence[Any]) -> None:
        """Start closed command lists after everything submitted before them."""
        handles = self.zero.ffi.new("ze_command_list_handle_t[]", list(lists))
        null = self.zero.ffi.NULL
        self.zero.call("CommandQueueExecuteCommandLists", self.handle, len(lists), handles, null)

    def finish(self) -> None:
        """Wait for everything submitted. Raises DeviceLost when it does not end."""
        if not self.drained(PATIENCE_SECONDS):
            raise DeviceLost(
                f"{self.device.name}: what was submitted did not end within {PATIENCE_SECONDS:g} s"
            )

    def drained(self, seconds: float) -> bool:
        """Wait for everything submitted; False when it has not ended after ``seconds``."""
        return self.zero.call("CommandQueueSynchronize", self.handle, nanoseconds(seconds))

    def run(self, name: str, *arguments: Any) -> None:
        """Append ``zeCommandListAppend<name>`` to the immediate list after everything submitted,
        and wait for it. Raises DeviceLost when it does not end."""
        self.finish()
        self._copied.reset(0)
        null, ended = self.zero.ffi.NULL, self._copied.handles[0]
        self.zero.call(f"CommandListAppend{name}", self.immediate, *arguments, ended, 0, null)
        if not self._copied.wait(0, PATIENCE_SECONDS):
            raise DeviceLost(
                f"{self.device.name}: {name} did not end within {PATIENCE_SECONDS:g} s"
            )

    @contextmanager
    def recording(self, commands: Any) -> Iterator[Append]:
        """A block that records commands into an empty command list, which is closed at its end. It
        yields a function that appends one command: its name, such as Barrier, then its
        arguments."""

        def append(name: str, *arguments: Any) -> None:
            self.zero.call(f"CommandListAppend{name}", commands, *arguments)

        yield append
        self.zero.call("CommandListClose", commands)

    def new_list(self) -> Any:
        """An empty command list for this queue."""
        description = self.zero.structure(
            "command_list_desc", commandQueueGroupOrdinal=self.device.ordinal
        )
        owner = self.context, self.device.handle, description
        return self.zero.create("CommandListCreate", "command_list", *owner)

    def close(self) -> None:
        """Destroy everything; nothing may be running. Safe to call twice."""
        if self._open is not None:
            self._open.close()
        self._open = None


class Events(ContextManager):
    """``count`` events of one pool, which the host resets before each use."""

    def __init__(self, queue: Queue, count: int) -> None:
        zero = self._zero = queue.zero
        self._undo = ExitStack()
        description = zero.structure(
            "event_pool_desc", flags=zero.constant("EVENT_POOL_FLAG_HOST_VISIBLE"), count=count
        )
        devices = zero.ffi.new("ze_device_handle_t[]", [queue.device.handle])
        pool = zero.create("EventPoolCreate", "event_pool", queue.context, description, 1, devices)
        self._undo.callback(zero.call, "EventPoolDestroy", pool)
        self.handles: list[Any] = []
        scope = zero.constant("EVENT_SCOPE_FLAG_HOST")
        try:
            for index in range(count):
                event = zero.structure("event_desc", index=index, signal=scope, wait=scope)
                self.handles.append(zero.create("EventCreate", "event", pool, event))
                self._undo.callback(zero.call, "EventDestroy", self.handles[-1])
        except BaseException:
            self._undo.close()
            raise

    def reset(self, index: int) -> None:
        """Make an event not signaled; nothing submitted may use it."""
        self._zero.call("EventHostReset", self.handles[index])

    def reached(self, index: int) -> bool:
        """Whether an event is signaled. Raises DeviceLost."""
        return self._zero.call("EventQueryStatus", self.handles[index])

    def wait(self, index: int, seconds: float) -> bool:
        """Wait for an event; False when it is not signaled after ``seconds``."""
        return self._zero.call("EventHostSynchronize", self.handles[index], nanoseconds(seconds))

    def array(self, index: int) -> Any:
        """A C array of one event, as commands that wait take it."""
        return self._zero.ffi.new("ze_event_handle_t[]", [self.handles[index]])

    def close(self) -> None:
        """Destroy the events and their pool."""
        self._undo.close()


def nanoseconds(seconds: float) -> int:
    """A time limit as Level Zero takes it; the largest value would mean none."""
    return max(0, min(int(seconds * 1e9), MAX_NANOSECONDS))
