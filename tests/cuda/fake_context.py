"""Contexts, streams and events of the double of the driver, and its statuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from threading import RLock, local
from typing import Any

import numpy as np


class CUresult(IntEnum):
    """The statuses the double answers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905


SUCCESS = CUresult.CUDA_SUCCESS


def floats(address: int, count: int) -> np.ndarray:
    """float32[count] at an address."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def words(address: int, count: int) -> np.ndarray:
    """uint32[count] at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


TURN = RLock()
"""Whose thread executes what was enqueued, by anybody."""


def always() -> bool:
    """Of what waits for nobody."""
    return True


@dataclass
class FakeContext:
    """``queue`` are operations nobody waited for; a fault leaves an error to every later call."""

    queue: list[Callable[[], None]] = field(default_factory=list)
    aside: dict[Any, list[Callable[[], None]]] = field(default_factory=dict)
    """What was enqueued on other streams: done as soon as it waits for nothing or, where they are
    ``late``, as late as somebody waits for it."""
    late: bool = False
    memory: dict[int, Any] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    graph: Capture | None = None
    error: CUresult = SUCCESS
    hangs: bool = False
    destroyed: bool = False
    asked: int = 0
    streams: int = 0
    others: list[FakeContext] = field(default_factory=list)
    """Contexts of other devices, which go on only while this one waits for them."""

    @property
    def blocks(self) -> dict[int, Any]:
        """The memory of this moment: other threads allocate and free."""
        return self.memory.copy()

    def run(self, most: int | None = None) -> None:
        """Execute what was enqueued, but for a kernel that hangs and what follows it."""
        done = 0
        with TURN:
            while self.queue and not self.hangs and not self.error and done != most:
                if self.advance():
                    done += 1
                elif not self.advance_aside() and not any(one.advance() for one in self.others):
                    break
            while not self.queue and self.advance_aside():
                pass

    def advance(self) -> bool:
        """Execute what comes next; False when there is nothing, or it waits for another device."""
        if not self.queue or self.hangs or self.error or self.destroyed:
            return False
        if not getattr(self.queue[0], "ready", always)():
            return False
        self.queue.pop(0)()
        while not self.late and self.advance_aside():
            pass
        return True

    def advance_aside(self) -> bool:
        """The same of what comes next on one of the other streams."""
        for queue in self.aside.values():
            if queue and not self.destroyed and getattr(queue[0], "ready", always)():
                queue.pop(0)()
                return True
        return False


@dataclass(eq=False)
class FakeEvent:
    """``recorded`` and ``reached`` count its places in streams."""

    recorded: int = 0
    reached: int = 0

    @property
    def passed(self) -> bool:
        return self.reached == self.recorded

    def reach(self) -> None:
        self.reached += 1


@dataclass
class EventWait:
    """What follows in the stream waits for the place an event had then."""

    event: FakeEvent
    place: int

    def ready(self) -> bool:
        return self.event.reached >= self.place

    def __call__(self) -> None:
        pass


@dataclass(frozen=True)
class CapturedRecord:
    """An event recorded while its stream is captured: an edge of each launch of the graph."""

    event: FakeEvent


@dataclass(frozen=True)
class CapturedWait:
    """What waits for such an event."""

    event: FakeEvent


Captured = tuple[Any, Callable[[], Any] | CapturedRecord | CapturedWait]


class Capture(list[Captured]):
    """The streams that are captured and what is enqueued on each, in order.

    A stream joins by waiting for an event of a captured one. The capture is ``broken`` by a call of
    its thread that may wait for the device, in whatever context
    (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)."""

    broken = False

    def takes(self, stream: Any, first: Any) -> bool:
        """Whether ``stream`` is captured; ``first`` always is."""
        return stream == first or any(stream == one for one, _ in self)

    def records(self, event: FakeEvent) -> bool:
        """Whether ``event`` was recorded in a captured stream."""
        return any(isinstance(op, CapturedRecord) and op.event is event for _, op in self)

    def joined(self, first: Any) -> bool:
        """Whether ``first`` waits for the last operation of every other stream."""
        for stream in {one for one, _ in self if one != first}:
            last = max(index for index, (one, _) in enumerate(self) if one == stream)
            found = self[last][1]
            if not isinstance(found, CapturedRecord):
                return False
            if (first, CapturedWait(found.event)) not in self[last:]:
                return False
        return True


class Thread(local):
    """A thread's stack of contexts, and what it captures."""

    def __init__(self) -> None:
        self.current = FakeContext(destroyed=True)
        self.covered: list[FakeContext] = []
        self.captures: Capture | None = None
