"""Device memory in arenas: large allocations of the driver, of which ranges are handed out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import field
from enum import Enum, auto
from typing import Generic, TypeVar

import numpy as np

from accel.packets.free_ranges import FreeRanges
from accel.packets.packet import ALIGNMENT, aligned
from contract.arrays import Bytes
from contract.errors import OutOfMemory
from contract.lazy_dataclass import dataclass

MIN_ARENA_BYTES = 64 << 10
MAX_ARENA_BYTES = 1 << 30
"""Largest arena for more than one allocation."""
STEPS_ARENA_BYTES = 1 << 20
"""Size of an arena of any kind but MODEL."""
GROWTH = 64
"""An arena for allocations that were not announced has this part of all allocated memory."""
STAGING_BYTES = 8 << 20

H = TypeVar("H")


class ArenaKind(Enum):
    """The purpose of an arena."""

    MODEL = auto()
    """Buffers of graphs and what batches keep: memory that a plan counts."""
    STEPS = auto()
    """Inputs and outputs of steps in flight."""
    HOST = auto()
    """Memory of the host that the device can access."""
    VIEW = auto()
    """Pages of a mapped file that the device can access."""


@dataclass(slots=True, eq=False)
class Arena(Generic[H]):
    """One allocation of the driver, which knows it by ``handle``. ``host`` are its bytes if the
    host can access them; ``ranges`` tracks the free ones."""

    handle: H
    address: int
    nbytes: int
    kind: ArenaKind
    host: Bytes | None = None
    ranges: FreeRanges = field(init=False)

    def __post_init__(self) -> None:
        self.ranges = FreeRanges(self.nbytes)


@dataclass(slots=True, eq=False)
class ArenaRange(Generic[H]):
    """``nbytes`` bytes of an arena from byte ``offset`` on.

    ``mirror`` is its copy in host memory, None until it is mapped. The mirror is copied to the
    device before a submission to an idle device if ``sent``, and from the device after every
    submission if ``fetched``."""

    arena: Arena[H]
    offset: int
    nbytes: int
    mirror: ArenaRange[H] | None = None
    sent: bool = True
    fetched: bool = True

    @property
    def address(self) -> int:
        """The address as packets contain it."""
        return self.arena.address + self.offset

    @property
    def host(self) -> Bytes | None:
        """The bytes if the host can access them."""
        whole = self.arena.host
        return None if whole is None else whole[self.offset : self.offset + self.nbytes]

    @property
    def host_view(self) -> Bytes:
        """The bytes; only for memory that the host can access."""
        host = self.host
        assert host is not None
        return host


class ArenaMemory(ABC, Generic[H]):
    """All memory of a device whose memory the host can access. Sizes are in bytes.

    ``capacity`` is the most it allocates for the model, ``largest`` the largest allocation that the
    driver accepts, ``used`` the bytes of the model's allocations.

    Hooks that a tier implements: ``guarded``, ``_create``, ``_release`` and ``_finish``."""

    def __init__(self, capacity: int, largest: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._largest = largest
        self._arenas: list[Arena[H]] = []
        self._expected = 0
        self._allocated = 0

    @property
    def held(self) -> int:
        """Bytes allocated for the model, unused ones included."""
        return sum(arena.nbytes for arena in self._arenas if arena.kind is ArenaKind.MODEL)

    @property
    def available(self) -> int:
        """Bytes that can still be allocated for the model."""
        return max(0, self.capacity - self.held)

    def expect(self, nbytes: int) -> None:
        """Reserve room for allocations of ``nbytes`` bytes in all, alignment included."""
        self._expected = self._allocated + nbytes

    def allocate(
        self, purpose: str, nbytes: int, kind: ArenaKind = ArenaKind.MODEL, *, zeroed: bool = True
    ) -> ArenaRange[H]:
        """Memory of a kind. Raises OutOfMemory naming its ``purpose``."""
        size = aligned(nbytes)
        allocation = self._take(purpose, nbytes, size, kind)
        if kind is ArenaKind.MODEL:
            self.used += nbytes
            self._allocated += size
        if zeroed:
            self._zero(allocation, size)
        return allocation

    def adopt(self, purpose: str, data: Bytes) -> ArenaRange[H]:
        """Memory for the model with the contents ``data``."""
        allocation = self.allocate(purpose, data.nbytes, zeroed=False)
        self._put(allocation, 0, data)
        return allocation

    def map(self, allocation: ArenaRange[H]) -> Bytes:
        """The bytes in host memory."""
        return allocation.host_view

    def read(self, allocation: ArenaRange[H], offset: int, nbytes: int) -> Bytes:
        """A copy of ``nbytes`` bytes from ``offset`` on, after everything submitted has ended."""
        self._finish()
        return allocation.host_view[offset : offset + nbytes].copy()

    def write(self, allocation: ArenaRange[H], offset: int, data: Bytes) -> None:
        """Replace bytes from ``offset`` on, after everything submitted has ended."""
        self._finish()
        self._put(allocation, offset, data)

    def free(self, allocation: ArenaRange[H]) -> None:
        """Free the memory, which nothing submitted may still use."""
        arena, size = allocation.arena, aligned(allocation.nbytes)
        if arena not in self._arenas:
            return
        arena.ranges.free(allocation.offset, size)
        if arena.kind is ArenaKind.MODEL:
            self.used -= allocation.nbytes
            self._allocated -= size
        if arena.ranges.all_free:
            self._drop(arena)

    def close(self) -> None:
        """Free everything; nothing may be running."""
        while self._arenas:
            self._release(self._arenas.pop())

    @abstractmethod
    def guarded(self, purpose: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Hook: a context that converts errors of the driver to those of the contract. They name
        ``purpose``, the operation, which needs ``nbytes`` bytes."""

    @abstractmethod
    def _create(self, purpose: str, nbytes: int, kind: ArenaKind) -> Arena[H]:
        """Hook: allocate an arena."""

    @abstractmethod
    def _release(self, arena: Arena[H]) -> None:
        """Hook: free an arena that nothing submitted uses."""

    @abstractmethod
    def _finish(self) -> None:
        """Hook: return once nothing submitted is running."""

    def _limit(self) -> int:
        """Hook: the most bytes of the next arena of the model."""
        return min(self.available, self._largest)

    def _zero(self, allocation: ArenaRange[H], size: int) -> None:
        """Hook: set the ``size`` bytes of a new allocation to 0."""
        allocation.host_view[:] = 0

    def _put(self, allocation: ArenaRange[H], offset: int, data: Bytes) -> None:
        """Hook: replace bytes that nothing submitted uses."""
        allocation.host_view[offset : offset + data.nbytes] = flat_bytes(data)

    def _drop(self, arena: Arena[H]) -> None:
        """Free an arena once everything submitted, which may use it, has ended."""
        self._finish()
        self._arenas.remove(arena)
        self._release(arena)

    def _take(self, purpose: str, nbytes: int, size: int, kind: ArenaKind) -> ArenaRange[H]:
        for arena in self._arenas:
            if arena.kind is kind and (offset := arena.ranges.allocate(size)) is not None:
                return ArenaRange(arena, offset, nbytes)
        arena = self._new_arena(purpose, size, kind)
        offset = arena.ranges.allocate(size)
        assert offset is not None
        return ArenaRange(arena, offset, nbytes)

    def _new_arena(self, purpose: str, size: int, kind: ArenaKind) -> Arena[H]:
        requested = STEPS_ARENA_BYTES
        if kind is ArenaKind.MODEL:
            limit = self._limit()
            if size > limit:
                raise OutOfMemory(purpose, size, self.held, limit)
            requested = self._expected - self._allocated
            if requested <= 0:
                requested = max(self.held // GROWTH, MIN_ARENA_BYTES)
            requested = min(requested, limit)
        requested = min(requested, MAX_ARENA_BYTES, self._largest) // ALIGNMENT * ALIGNMENT
        nbytes = max(requested, size)
        with self.guarded(purpose, nbytes):
            arena = self._create(purpose, nbytes, kind)
        self._arenas.append(arena)
        return arena


class MirroredMemory(ArenaMemory[H]):
    """All memory of a device that may have memory which the host cannot access.

    Such memory gets a copy in host memory, its mirror, when it is mapped. ``exchanges`` changes
    whenever the result of ``mirrored`` does.

    Hooks that a tier implements in addition to those of ArenaMemory: ``copy``, ``_await_copy`` and
    ``_zero``."""

    def __init__(self, capacity: int, largest: int) -> None:
        super().__init__(capacity, largest)
        self.exchanges = 0
        self._mapped: list[ArenaRange[H]] = []
        self._staging: list[tuple[ArenaRange[H], int]] = []
        self._staging_bytes = min(STAGING_BYTES, largest)

    def map(self, allocation: ArenaRange[H]) -> Bytes:
        """The bytes in host memory, kept in sync from now on as ``sent`` and ``fetched`` say."""
        if allocation.host is not None:
            return allocation.host
        mirror = allocation.mirror
        if mirror is None:
            name = "host copy of a buffer"
            mirror = self.allocate(name, allocation.nbytes, ArenaKind.HOST, zeroed=False)
            allocation.mirror = mirror
            self._mapped.append(allocation)
            self.exchanges += 1
        elif allocation.fetched:
            return mirror.host_view
        self._await_copy(self.copy(allocation, 0, mirror, 0, allocation.nbytes))
        return mirror.host_view

    def read(self, allocation: ArenaRange[H], offset: int, nbytes: int) -> Bytes:
        """A copy of ``nbytes`` bytes from ``offset`` on; of mapped memory from its mirror, which is
        current."""
        if allocation.host is not None:
            return super().read(allocation, offset, nbytes)
        if allocation.mirror is not None and allocation.fetched:
            return allocation.mirror.host_view[offset : offset + nbytes].copy()
        data = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, self._staging_bytes):
            part = data[start : start + self._staging_bytes]
            staging, _ = self._staged()
            self._await_copy(self.copy(allocation, offset + start, staging, 0, part.nbytes))
            part[:] = staging.host_view[: part.nbytes]
        return data

    def write(self, allocation: ArenaRange[H], offset: int, data: Bytes) -> None:
        """Replace bytes from ``offset`` on. If the host can access them, nothing submitted may
        still use them; otherwise the write is ordered with the submissions."""
        self._put(allocation, offset, data)

    def free(self, allocation: ArenaRange[H]) -> None:
        """Free memory that no step in flight uses; copies may still use it."""
        if allocation.mirror is not None and allocation.arena in self._arenas:
            self._mapped = [mapped for mapped in self._mapped if mapped is not allocation]
            self.exchanges += 1
            super().free(allocation.mirror)
            allocation.mirror = None
        super().free(allocation)

    def mirrored(self, to_device: bool) -> list[tuple[ArenaRange[H], ArenaRange[H]]]:
        """Source and target of each copy that keeps mirrors in sync: before a submission if
        ``to_device``, else after it."""
        pairs = [(m.mirror, m) for m in self._mapped if m.mirror is not None and m.nbytes]
        if to_device:
            return [pair for pair in pairs if pair[1].sent]
        return [pair[::-1] for pair in pairs if pair[1].fetched]

    @abstractmethod
    def copy(
        self, source: ArenaRange[H], first: int, target: ArenaRange[H], offset: int, nbytes: int
    ) -> int:
        """Hook: copy bytes, ordered with the submissions; returns the number of this copy."""

    @abstractmethod
    def _await_copy(self, number: int) -> None:
        """Hook: return once copy ``number`` has ended."""

    def _put(self, allocation: ArenaRange[H], offset: int, data: Bytes) -> None:
        if allocation.host is not None:
            super()._put(allocation, offset, data)
            return
        flat = flat_bytes(data)
        if allocation.mirror is not None:
            allocation.mirror.host_view[offset : offset + flat.nbytes] = flat
        for start in range(0, flat.nbytes, self._staging_bytes):
            part = flat[start : start + self._staging_bytes]
            staging, index = self._staged()
            staging.host_view[: part.nbytes] = part
            number = self.copy(staging, 0, allocation, offset + start, part.nbytes)
            self._staging[index] = staging, number

    def _staged(self) -> tuple[ArenaRange[H], int]:
        """Staging memory that no copy uses, and its index."""
        if not self._staging:
            size = self._staging_bytes
            buffers = [self.allocate("staging memory", size, ArenaKind.HOST) for _ in range(2)]
            self._staging = [(buffer, 0) for buffer in buffers]
        index = min(range(len(self._staging)), key=lambda n: self._staging[n][1])
        staging, number = self._staging[index]
        self._await_copy(number)
        return staging, index


def flat_bytes(data: Bytes) -> Bytes:
    """The bytes of an array in one dimension."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
