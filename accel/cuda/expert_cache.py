"""Keeps the experts that are used most in device memory; all experts are in host memory.

Kernels find each matrix of a stack through a list of addresses, and count its uses. Between steps
the host moves frequently used experts to the device, without waiting:

1. A copy of the counts is enqueued.
2. Once it has arrived, the host chooses. Evicted experts get their host addresses, in the order of
steps, and the copies of the new experts wait for the steps before.
3. Once these copies have ended, the new experts get their addresses on the device.

A step reads the same bytes from either memory, so its bits do not depend on this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.cuda.memory import Allocation, HostWeight, Memory
from accel.cuda.submissions import Mark
from accel.packets.packet import aligned
from contract.arrays import Bytes

STEPS = 16
"""Steps between two choices."""
MAX_MOVES = 2
"""Most experts of a layer moved by one choice, so that copies leave the link to the steps."""
MIN_GAIN = 1.25
"""An expert replaces another one if it is used this many times as often."""
AGEING = 0.75
"""The weight of earlier uses at each choice."""
WORD_BYTES, COUNT_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class StackShape:
    """A stack of ``experts`` matrices of ``matrix_bytes`` each."""

    name: str
    experts: int
    matrix_bytes: int

    @property
    def list_words(self) -> int:
        """Words of its list: the address of its counts, and those of its matrices."""
        return 1 + self.experts


@dataclass(slots=True)
class CachedLayer:
    """The stacks of one layer, whose matrices of an expert are on the device together.

    ``slots`` has the expert in each slot. ``lists`` are the word offsets of the stacks' lists,
    ``counts`` the offsets of their counts."""

    stacks: Sequence[StackShape]
    address: int
    slots: list[int]
    lists: Sequence[int]
    counts: Sequence[int]
    uses: NDArray[np.float64]

    @property
    def slot_bytes(self) -> int:
        """Bytes of an expert."""
        return slot_bytes(self.stacks)

    def addresses(self, slot: int) -> Iterator[int]:
        """Yield the address of each stack's matrix in a slot."""
        at = self.address + slot * self.slot_bytes
        for stack in self.stacks:
            yield at
            at += aligned(stack.matrix_bytes)

    def moves(self) -> list[tuple[int, int]]:
        """Slots, and the experts to move there, the most used first."""
        outside = [one for one in np.argsort(-self.uses, kind="stable") if one not in self.slots]
        inside = sorted(range(len(self.slots)), key=lambda slot: self.uses[self.slots[slot]])
        return [
            (slot, int(expert))
            for slot, expert in list(zip(inside, outside, strict=False))[:MAX_MOVES]
            if self.uses[expert] > MIN_GAIN * self.uses[self.slots[slot]]
        ]


def slot_bytes(stacks: Sequence[StackShape]) -> int:
    """Bytes of one expert of a layer on the device."""
    return sum(aligned(stack.matrix_bytes) for stack in stacks)


def table_bytes(layers: Sequence[Sequence[StackShape]]) -> int:
    """Bytes of the lists and counts of all stacks."""
    stacks = [stack for layer in layers for stack in layer]
    lists = sum(stack.list_words for stack in stacks) * WORD_BYTES
    return aligned(lists) + aligned(sum(stack.experts for stack in stacks) * COUNT_BYTES)


@dataclass(slots=True, eq=False)
class ExpertCache:
    """The cached experts of streamed stacks on one device. ``matrices`` are the stacks in host
    memory, known once ``fill`` was called."""

    memory: Memory
    layers: list[CachedLayer]
    slots: Allocation
    lists: Allocation
    counts: Allocation
    words: NDArray[np.uint64]
    matrices: dict[str, HostWeight] = field(default_factory=dict)
    moved: int = 0
    """Experts that were moved so far."""
    _steps: int = 0
    _seen: NDArray[np.uint32] | None = None
    _read: Bytes | None = None
    _mark: Mark | None = None
    _coming: list[tuple[CachedLayer, int, int]] = field(default_factory=list)
    _sent: list[Bytes] = field(default_factory=list)

    def address(self, name: str) -> int | None:
        """The address of a stack's list; None if it is not cached."""
        for layer in self.layers:
            for stack, offset in zip(layer.stacks, layer.lists, strict=True):
                if stack.name == name:
                    return self.lists.address + offset * WORD_BYTES
        return None

    def fill(self, matrices: Mapping[str, HostWeight]) -> None:
        """Copy the first experts of each layer to the device, in the order of steps."""
        self.matrices = dict(matrices)
        for layer in self.layers:
            for stack, at, counts in zip(layer.stacks, layer.lists, layer.counts, strict=True):
                self.words[at] = self.counts.address + counts * COUNT_BYTES
                mapped = self.matrices[stack.name].mapped
                for expert in range(stack.experts):
                    self.words[at + 1 + expert] = mapped + expert * stack.matrix_bytes
            for slot, expert in enumerate(layer.slots):
                self._copy(layer, slot, expert, self.memory.stream)
                self._point(layer, slot, expert)
        self._send_lists()

    def advance(self) -> None:
        """Go on with the moves; the caller enqueues a step next."""
        self._steps += 1
        if self._mark is not None:
            if not self._mark.passed:
                return
            self._mark = None
            if self._read is not None:
                self._choose()
            else:
                self._finish()
        elif self._steps >= STEPS:
            self._steps = 0
            self._look()

    def free(self) -> None:
        """Free all memory; no step uses it."""
        for allocation in (self.slots, self.lists, self.counts):
            self.memory.free(allocation)

    def _look(self) -> None:
        """Enqueue a copy of the counts beside the steps."""
        stream = self.memory.streams.weights
        self._read = self.memory.pinned.take(self.counts.nbytes)
        here, nbytes = self._read.ctypes.data, self.counts.nbytes
        Mark(self.memory.context, self.memory.stream).hold(stream)
        self.memory.context.call("cuMemcpyDtoHAsync", here, self.counts.address, nbytes, stream)
        self._mark = Mark(self.memory.context, stream)

    def _choose(self) -> None:
        """Choose from the counts, and enqueue the copies of the experts that come."""
        assert self._read is not None
        counts, self._read = self._read.view(np.uint32).copy(), None
        seen = counts if self._seen is None else counts - self._seen
        self._seen = counts
        for layer in self.layers:
            layer.uses *= AGEING
            for stack, first in zip(layer.stacks, layer.counts, strict=True):
                layer.uses += seen[first : first + stack.experts]
            self._coming += [(layer, *move) for move in layer.moves()]
        if not self._coming:
            return
        for layer, slot, _ in self._coming:
            leaving = layer.slots[slot]
            for stack, at in zip(layer.stacks, layer.lists, strict=True):
                mapped = self.matrices[stack.name].mapped
                self.words[at + 1 + leaving] = mapped + leaving * stack.matrix_bytes
        self._send_lists()
        stream = self.memory.streams.weights
        Mark(self.memory.context, self.memory.stream).hold(stream)
        for layer, slot, expert in self._coming:
            layer.slots[slot] = expert
            self._copy(layer, slot, expert, stream)
        self._mark = Mark(self.memory.context, stream)

    def _finish(self) -> None:
        """The experts are on the device: steps read them there from now on."""
        for layer, slot, expert in self._coming:
            self._point(layer, slot, expert)
        self.moved += len(self._coming)
        self._coming = []
        self._send_lists()

    def _copy(self, layer: CachedLayer, slot: int, expert: int, stream: object) -> None:
        for stack, address in zip(layer.stacks, layer.addresses(slot), strict=True):
            host = self.matrices[stack.name].host
            assert host is not None
            here = host.ctypes.data + expert * stack.matrix_bytes
            self.memory.context.call("cuMemcpyHtoDAsync", address, here, stack.matrix_bytes, stream)

    def _point(self, layer: CachedLayer, slot: int, expert: int) -> None:
        for at, address in zip(layer.lists, layer.addresses(slot), strict=True):
            self.words[at + 1 + expert] = address

    def _send_lists(self) -> None:
        """Enqueue the copy of all lists in the order of steps."""
        block = self.memory.pinned.take(self.words.nbytes)
        block[:] = self.words.view(np.uint8)
        self.memory.transfer(self.lists, block, True, 0)
        # Two copies may be waiting for steps: one of experts that leave, one of those that came.
        self._sent = [*self._sent[-3:], block]


def experts_held(layers: Sequence[Sequence[StackShape]], nbytes: int) -> int:
    """Experts of each layer that ``nbytes`` have room for on the device."""
    room = nbytes - table_bytes(layers)
    return max(0, room // sum(map(slot_bytes, layers))) if layers else 0


def make_expert_cache(
    memory: Memory, layers: Sequence[Sequence[StackShape]], nbytes: int
) -> ExpertCache | None:
    """A cache of at most ``nbytes`` bytes for the stacks of ``layers``, the same number of experts
    of each; None if that is none. Raises OutOfMemory."""
    each = experts_held(layers, nbytes)
    if not each:
        return None
    made, words, counts, at = [], 0, 0, 0
    number = [min(each, *(stack.experts for stack in layer)) for layer in layers]
    slots = memory.allocate(
        "experts on the device",
        sum(slot_bytes(layer) * n for layer, n in zip(layers, number, strict=True)),
        zeroed=False,
    )
    for layer, held in zip(layers, number, strict=True):
        lists_of, counts_of = [], []
        for stack in layer:
            lists_of.append(words)
            counts_of.append(counts)
            words, counts = words + stack.list_words, counts + stack.experts
        uses = np.zeros(layer[0].experts)
        made.append(
            CachedLayer(layer, slots.address + at, list(range(held)), lists_of, counts_of, uses)
        )
        at += held * slot_bytes(layer)
    lists = memory.allocate("addresses of experts", words * WORD_BYTES)
    uses_of = memory.allocate("uses of experts", counts * COUNT_BYTES)
    return ExpertCache(memory, made, slots, lists, uses_of, np.zeros(words, np.uint64))
