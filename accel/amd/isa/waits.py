"""Finds missing waits: code that uses data before its load has ended, which a GPU would and an
interpreter would not notice.

Loads of gfx12 end some time after they are issued; each kind has a counter: those of vectors and of
group memory end in order, scalar ones in any order. On gfx11 group memory and scalar loads share
one. An instruction may touch a register that a load writes only after a wait that allows no more
loads in flight than were issued since. And what a wave stores in group memory must be there before
it signals a barrier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from accel.amd.isa.blocks import Block, blocks_of
from accel.amd.isa.decode import GFX12, Instruction, Isa
from accel.amd.isa.semantics import ATOMIC, GLOBAL, LOCAL, SCALAR_LOAD, VECTOR_OFFSET, access

LOADS, STORES, LOCALS, SCALARS = "loadcnt", "storecnt", "dscnt", "kmcnt"
MAX_COUNT = 63
"""Largest value of a counter of six bits."""
STORED = -1
"""The number that stands for group memory among the registers."""

Pending = dict[tuple[str, int], int]
"""For a counter and a register of a load in flight: how many more were issued since, at least."""


@dataclass(frozen=True, slots=True)
class MissingWait:
    """An instruction that touches what may still be in flight."""

    instruction: Instruction
    counter: str
    register: int

    def __str__(self) -> str:
        what = f"s{self.register}"
        if self.register == STORED:
            what = "group memory"
        elif self.register >= VECTOR_OFFSET:
            what = f"v{self.register - VECTOR_OFFSET}"
        return (
            f"{self.instruction.name} at {self.instruction.address:#x} touches {what}, "
            f"for which no s_wait_{self.counter} was seen"
        )


def missing_waits(code: bytes, isa: Isa = GFX12) -> list[MissingWait]:
    """All missing waits, by address. Raises CodecError for code that cannot be executed."""
    return list(_Search(blocks_of(code, isa)).run())


@dataclass(slots=True)
class _Search:
    blocks: Mapping[int, Block]
    entry: dict[int, Pending] = field(default_factory=dict)

    def run(self) -> Iterator[MissingWait]:
        """Follow all paths until nothing changes, then report."""
        self.entry = {0: {}}
        work = [0]
        while work:
            start = work.pop()
            state = dict(self.entry[start])
            for instruction in self.blocks[start].instructions:
                _step(state, instruction)
            for following in self.blocks[start].successors:
                if following in self.blocks and self._merge(following, state):
                    work.append(following)
        for start in sorted(self.entry):
            state = dict(self.entry[start])
            for instruction in self.blocks[start].instructions:
                yield from _found(state, instruction)
                _step(state, instruction)

    def _merge(self, start: int, state: Pending) -> bool:
        """Merge a state into the entry of a block; whether that made it worse."""
        if start not in self.entry:
            self.entry[start] = dict(state)
            return True
        known, changed = self.entry[start], False
        for key, since in state.items():
            if since < known.get(key, MAX_COUNT + 1):
                known[key] = since
                changed = True
        return changed


def _found(state: Pending, instruction: Instruction) -> Iterator[MissingWait]:
    found = access(instruction)
    touched = found.reads | found.writes
    if instruction.name in ("s_barrier_signal", "s_barrier"):
        touched |= {STORED}
    own = counter_of(instruction)
    for counter, register in state:
        # Loads of one counter end in order, except scalar ones, so the later result stays.
        in_order = counter == own != SCALARS and register not in found.reads
        if register in touched and not in_order:
            yield MissingWait(instruction, counter, register)


def _step(state: Pending, instruction: Instruction) -> None:
    waits = dict(_waits(instruction))
    for key in [k for k, since in state.items() if k[0] in waits and _done(k[0], waits, since)]:
        del state[key]
    counter = counter_of(instruction)
    if counter is None:
        return
    for key in state:
        if key[0] == counter:
            state[key] = min(state[key] + 1, MAX_COUNT)
    written = access(instruction).writes
    if counter == LOCALS and (not written or ATOMIC.match(instruction.name)):
        written |= {STORED}
    for register in written:
        state[counter, register] = 0


def _done(counter: str, waits: Mapping[str, int], since: int) -> bool:
    if counter == SCALARS:
        return waits[counter] == 0
    return waits[counter] <= since


def counter_of(instruction: Instruction) -> str | None:
    """The counter that counts an instruction while it is in flight."""
    name = instruction.name
    if (found := GLOBAL.match(name)) is not None:
        return LOADS if found[1] == "load" else STORES
    if LOCAL.match(name) or ATOMIC.match(name):
        return LOCALS
    return SCALARS if SCALAR_LOAD.match(name) else None


def _waits(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Counters that an instruction waits for, and how many it allows in flight."""
    name = instruction.name
    if name == "s_waitcnt_vscnt":
        yield STORES, instruction.fields["simm"] & MAX_COUNT
    if name == "s_waitcnt":
        simm = instruction.fields["simm"]
        yield LOADS, simm >> 10 & MAX_COUNT
        # One counter counts both: group memory ends in order, so no more of it may be in flight
        # than of both together, whichever of the others have ended.
        yield from ((counter, simm >> 4 & MAX_COUNT) for counter in (LOCALS, SCALARS))
    if not name.startswith("s_wait_"):
        return
    counts = instruction.fields["simm"]
    counters = name.removeprefix("s_wait_").split("_")
    if len(counters) == 2:
        yield counters[0], counts >> 8 & MAX_COUNT
    yield counters[-1], counts & MAX_COUNT
