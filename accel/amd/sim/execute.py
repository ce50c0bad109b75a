"""Runs kernels on numpy: all waves of many work-groups at a time, in lockstep.

The waves at the lowest address run first, so that diverged waves meet again. Waits do nothing,
since loads complete at once; ``waits.py`` checks that they are where they must be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from accel.amd.isa.blocks import Block, blocks_of
from accel.amd.isa.decode import EXEC, GFX12, SCC, SGPRS, TTMP, Isa
from accel.amd.isa.semantics import BARRIERS
from accel.amd.sim import arithmetic
from accel.amd.sim.arithmetic import WAVE
from accel.amd.sim.memory_view import GpuFault, MemoryView
from accel.amd.sim.registers import taken
from accel.amd.sim.translate import block_function
from contract.arrays import Array

GROUPS_AT_A_TIME = 64
MAX_STEPS = 50_000_000
"""Blocks of one launch after which it counts as endless."""
WORKGROUP_ID = TTMP + 9
"""The register with the number of the group on gfx12; on gfx11 it follows the registers that a
dispatch fills."""


class Watcher(Protocol):
    """Observes what a launch accesses, as indices of 32-bit words of memory."""

    def read(self, words: Array) -> None:
        """Raises GpuFault if a read may return old data."""

    def wrote(self, words: Array) -> None:
        """Record a write."""


@dataclass(slots=True)
class Program:
    """The code of a kernel; its blocks are found when it first runs."""

    name: str
    code: bytes
    isa: Isa = GFX12
    blocks: Mapping[int, Block] = field(default_factory=dict)

    def block(self, address: int) -> Block:
        """The block at ``address``. Raises GpuFault if no instruction of the kernel leads there."""
        if not self.blocks:
            self.blocks = blocks_of(self.code, self.isa)
        block = self.blocks.get(address)
        if block is None:
            raise GpuFault(f"{self.name}: no code at {address:#x}")
        return block


@dataclass(frozen=True, slots=True)
class Executed:
    """Instructions, counted once per wave, and how many of them are matrix products."""

    instructions: int
    products: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The registers of a dispatch: its arguments, the waves of a work-group, group memory.

    ``group_register`` is the scalar register with the number of the group."""

    program: Program
    arguments: int
    waves: int
    local_bytes: int
    vector_registers: int
    group_register: int = WORKGROUP_ID


class WorkGroupExecutor:
    """Executes some work-groups of a launch. ``waves`` is the number of all their waves."""

    def __init__(
        self, memory: MemoryView, launch: Launch, groups: range, watcher: Watcher | None
    ) -> None:
        self.memory = memory
        self.waves = len(groups) * launch.waves
        self.instructions = self.products = 0
        self._launch = launch
        self._watcher = watcher
        self._words = memory.words
        self._local_bytes = launch.local_bytes
        words = launch.local_bytes // 4
        self._local = np.zeros(len(groups) * words, np.uint32)
        group = np.repeat(np.arange(len(groups)), launch.waves)
        self._local_base = (group * words)[:, None]
        self._group = group
        self._vector: list[Array] = [np.zeros((1, 1), np.uint32)] * launch.vector_registers
        self._scalar: list[Array] = [np.zeros(1, np.uint32)] * (SCC + 1)
        self._start(groups, launch)
        self._exec = self._lanes = self._scalar[EXEC]
        self._full = True

    def _start(self, groups: range, launch: Launch) -> None:
        item = np.arange(launch.waves * WAVE, dtype=np.uint32).reshape(launch.waves, WAVE)
        self._vector[0] = np.tile(item, (len(groups), 1))
        arguments = launch.arguments
        self._scalar[0] = np.array([arguments & 0xFFFF_FFFF], np.uint32)
        self._scalar[1] = np.array([arguments >> 32], np.uint32)
        numbers = np.array(groups, np.uint32)
        self._scalar[launch.group_register] = np.repeat(numbers, launch.waves)
        self._scalar[EXEC] = np.ones((1, 1), np.bool_)
        self._scalar[SCC] = np.zeros(1, np.bool_)
        assert len(self._scalar) > SGPRS

    def run(self) -> None:
        """Run until all waves have ended. Raises GpuFault."""
        waiting: dict[int, Array | None] = {0: None}
        parked: dict[int, Array] = {}
        ended = np.zeros(self.waves, np.bool_)
        steps = 0
        everyone = np.arange(self.waves)
        while waiting or parked:
            if not waiting:
                self._release(waiting, parked, ended)
            address = min(waiting)
            waves = waiting.pop(address)
            block = self._launch.program.block(address)
            condition = self._execute(block, waves)
            steps += 1
            if steps > MAX_STEPS:
                raise GpuFault(f"{self._launch.program.name}: does not end")
            last = block.last
            if last.name == "s_endpgm":
                ended[everyone if waves is None else waves] = True
            elif last.name in BARRIERS:
                self._park(parked, last.end, everyone if waves is None else waves)
                self._release(waiting, parked, ended, every=False)
            elif condition is None:
                self._join(waiting, block.successors[0], waves)
            else:
                self._branch(waiting, block, waves, condition)

    def _execute(self, block: Block, waves: Array | None) -> Array | None:
        if self._scalar[EXEC] is not self._exec:
            self._exec = self._scalar[EXEC]
            self._lanes = arithmetic.as_lanes(self._exec)
            self._full = bool(self._lanes.all())
        lanes, base, full = self._lanes, self._local_base, self._full
        if waves is not None:
            lanes, base = taken(lanes, waves), base[waves]
            full = full or bool(lanes.all())
        count = self.waves if waves is None else len(waves)
        self.instructions += count * len(block.instructions)
        self.products += count * block.products
        function = block_function(block, not full, waves is not None)
        condition: Array | None = function(self, self._scalar, self._vector, lanes, base, waves)
        return condition

    def _branch(
        self, waiting: dict[int, Array | None], block: Block, waves: Array | None, condition: Array
    ) -> None:
        following, target = block.successors
        if condition.all():
            self._join(waiting, target, waves)
        elif not condition.any():
            self._join(waiting, following, waves)
        else:
            each = np.arange(self.waves) if waves is None else waves
            self._join(waiting, target, each[condition])
            self._join(waiting, following, each[~condition])

    def _join(self, waiting: dict[int, Array | None], address: int, waves: Array | None) -> None:
        """Continue waves at ``address``, together with those already there."""
        if waves is not None and address in waiting:
            there = waiting[address]
            assert there is not None
            waves = np.sort(np.concatenate([there, waves]))
        if waves is not None and len(waves) == self.waves:
            waves = None
        waiting[address] = waves

    def _park(self, parked: dict[int, Array], address: int, waves: Array) -> None:
        there = parked.get(address)
        parked[address] = waves if there is None else np.sort(np.concatenate([there, waves]))

    def _release(
        self,
        waiting: dict[int, Array | None],
        parked: dict[int, Array],
        ended: Array,
        every: bool = True,
    ) -> None:
        """Continue waves whose whole group has come to the barrier."""
        arrived = ended.copy()
        for waves in parked.values():
            arrived[waves] = True
        of_groups = arrived.reshape(-1, self._launch.waves)
        complete = np.logical_and.reduce(of_groups, axis=1)[self._group]
        for address in list(parked):
            waves = parked[address]
            ready = complete[waves]
            if ready.any():
                self._join(waiting, address, waves[ready])
                parked[address] = waves[~ready]
                if not len(parked[address]):
                    del parked[address]
        if every and not waiting:
            raise GpuFault(f"{self._launch.program.name}: waves wait at different barriers")

    def scalar_load(self, addresses: Array, dwords: int) -> list[Array]:
        """uint32[waves] for each word. Raises GpuFault."""
        offsets = self.memory.offsets(addresses, 4 * dwords, None)
        if (offsets & 3).any():
            raise GpuFault(f"scalar load of {int(addresses.flat[0]):#x}, which 4 does not divide")
        first = offsets >> 2
        if self._watcher is not None:
            for n in range(dwords):
                self._watcher.read(first + n)
        return [self._words.take(first + n) for n in range(dwords)]

    def load(
        self, addresses: Array, nbytes: int, signed: bool, taking_part: Array | None
    ) -> list[Array]:
        """uint32[waves, 32] for each word; one for a smaller number. Raises GpuFault."""
        offsets = self.memory.offsets(addresses, nbytes, taking_part)
        if self._watcher is not None:
            self._watch_read(offsets, nbytes)
        if nbytes < 4:
            value = self._bytes(offsets, nbytes)
            if signed:
                shift = 32 - 8 * nbytes
                value = (value << shift).view(np.int32).__rshift__(shift).view(np.uint32)
            return [value]
        if (offsets & 3).any():
            return [self._bytes(offsets + 4 * n, 4) for n in range(nbytes // 4)]
        first = offsets >> 2
        return [self._words.take(first + n if n else first) for n in range(nbytes // 4)]

    def _bytes(self, offsets: Array, count: int) -> Array:
        data = self.memory.data
        value = data.take(offsets).astype(np.uint32)
        for n in range(1, count):
            value |= data.take(offsets + n).astype(np.uint32) << np.uint32(8 * n)
        return value

    def _watch_read(self, offsets: Array, nbytes: int) -> None:
        assert self._watcher is not None
        for word in range(-(-nbytes // 4)):
            self._watcher.read(offsets + 4 * word >> 2)

    def store(
        self, addresses: Array, nbytes: int, data: tuple[Array, ...], taking_part: Array | None
    ) -> None:
        """Store ``nbytes`` bytes at each address. Raises GpuFault."""
        offsets = self.memory.offsets(addresses, nbytes, taking_part)
        offsets, values = _taking_part(offsets, data, taking_part)
        if self._watcher is not None:
            for word in range(-(-nbytes // 4)):
                self._watcher.wrote(offsets + 4 * word >> 2)
        if nbytes >= 4 and not (offsets & 3).any():
            for n, value in enumerate(values):
                self._words[(offsets >> 2) + n] = value
            return
        for n in range(nbytes):
            part = values[n // 4] >> np.uint32(8 * (n % 4))
            self.memory.data[offsets + n] = part.astype(np.uint8)

    def _local_words(
        self, addresses: Array, first: int, nbytes: int, base: Array, taking_part: Array | None
    ) -> Array:
        """Word indices in group memory; lanes that take no part get the first word of their
        group."""
        offsets = addresses.astype(np.int64) + first
        if taking_part is not None:
            offsets = np.where(taking_part, offsets, 0)
        if int(offsets.max()) + nbytes > self._local_bytes or (offsets & 3).any():
            raise GpuFault(
                f"group memory: {nbytes} bytes at {int(offsets.max()):#x} of {self._local_bytes:#x}"
            )
        return (offsets >> 2) + base

    def local_load(
        self, addresses: Array, first: int, dwords: int, base: Array, taking_part: Array | None
    ) -> list[Array]:
        """Words of group memory, uint32[waves, 32] each. Raises GpuFault."""
        offsets = self._local_words(addresses, first, 4 * dwords, base, taking_part)
        return [self._local.take(offsets + n) for n in range(dwords)]

    def local_store(
        self,
        addresses: Array,
        first: int,
        dwords: int,
        base: Array,
        data: tuple[Array, ...],
        taking_part: Array | None,
    ) -> None:
        """Store words in group memory. Raises GpuFault."""
        offsets = self._local_words(addresses, first, 4 * dwords, base, taking_part)
        where, values = _taking_part(offsets, data, taking_part)
        for n, part in enumerate(values):
            self._local[where + n if n else where] = part

    def local_add(
        self, addresses: Array, first: int, base: Array, data: Array, taking_part: Array | None
    ) -> Array:
        """Add to words of group memory, one lane after the other; returns the previous value for
        each lane."""
        offsets = self._local_words(addresses, first, 4, base, taking_part)
        shape = (len(base), WAVE)
        lanes = True if taking_part is None else taking_part
        chosen = np.broadcast_to(lanes, shape)
        where = np.broadcast_to(offsets, shape)[chosen]
        amounts = np.broadcast_to(data, shape)[chosen]
        order = np.argsort(where, kind="stable")
        sums = np.cumsum(amounts[order], dtype=np.uint32) - amounts[order]
        starts = np.flatnonzero(np.r_[True, np.diff(where[order]) != 0]) if len(order) else order
        counts = np.diff(np.r_[starts, len(order)])
        before = sums - np.repeat(sums[starts], counts)
        found = np.zeros(shape, np.uint32)
        earlier = np.empty_like(amounts)
        earlier[order] = before + self._local[where[order]]
        found[chosen] = earlier
        np.add.at(self._local, where, amounts)
        return found


def _taking_part(
    offsets: Array, data: tuple[Array, ...], taking_part: Array | None
) -> tuple[Array, list[Array]]:
    """The indices and values of the lanes that take part."""
    arrays = [offsets, *data] if taking_part is None else [offsets, *data, taking_part]
    if any(array.shape != offsets.shape for array in arrays):
        arrays = list(np.broadcast_arrays(*arrays))
    if taking_part is not None:
        chosen = arrays.pop()
        arrays = [array[chosen] for array in arrays]
    return arrays[0], arrays[1:]


def run_launch(
    memory: MemoryView, launch: Launch, groups: int, watcher: Watcher | None = None
) -> Executed:
    """Run all work-groups of a launch. Raises GpuFault."""
    instructions = products = 0
    with np.errstate(all="ignore"):
        for first in range(0, groups, GROUPS_AT_A_TIME):
            some = range(first, min(first + GROUPS_AT_A_TIME, groups))
            machine = WorkGroupExecutor(memory, launch, some, watcher)
            machine.run()
            instructions += machine.instructions
            products += machine.products
    return Executed(instructions, products)
