"""Basic blocks of machine code, and which registers are read after each.

A block ends at a branch, at a barrier, and after every change of EXEC, so that the same lanes take
part in all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from accel.amd.isa.decode import EXEC, GFX12, Instruction, Isa, instructions
from accel.amd.isa.semantics import BARRIERS, MATRIX, VECTOR_OFFSET, access

Function = Callable[..., Any]


@dataclass(slots=True)
class Block:
    """Instructions that are all executed once the first one is.

    ``products`` counts those that multiply matrices. ``live`` are the registers that an instruction
    after the block may read. ``functions`` are the block's translations to Python, each made at its
    first use; the key says whether all lanes, and whether all waves, take part."""

    instructions: list[Instruction]
    products: int = 0
    live: frozenset[int] = frozenset()
    functions: dict[tuple[bool, bool], Function] = field(default_factory=dict)
    successors: tuple[int, ...] = ()
    """Addresses of the blocks that may follow."""

    @property
    def address(self) -> int:
        """The address of the first instruction."""
        return self.instructions[0].address

    @property
    def last(self) -> Instruction:
        """The last instruction."""
        return self.instructions[-1]


def blocks_of(code: bytes, isa: Isa = GFX12) -> Mapping[int, Block]:
    """The basic blocks by their address. Raises CodecError for code that cannot be executed."""
    listed = list(_executed(code, isa))
    starts = {0}
    for instruction in listed:
        ends = instruction.name in ("s_endpgm", "s_branch", *BARRIERS)
        if instruction.name.startswith("s_cbranch") or instruction.name == "s_branch":
            starts.add(instruction.target)
            ends = True
        if ends or EXEC in access(instruction).writes:
            starts.add(instruction.end)
    blocks: dict[int, Block] = {}
    current = 0
    for instruction in listed:
        if instruction.address in starts:
            current = instruction.address
            blocks[current] = Block([])
        blocks[current].instructions.append(instruction)
        blocks[current].products += instruction.name == MATRIX
    for block in blocks.values():
        block.successors = _successors(block.last)
    _find_live(blocks)
    return MappingProxyType(blocks)


def _successors(last: Instruction) -> tuple[int, ...]:
    if last.name == "s_endpgm":
        return ()
    if last.name == "s_branch":
        return (last.target,)
    return (last.end, last.target) if last.name.startswith("s_cbranch") else (last.end,)


def _executed(code: bytes, isa: Isa) -> Iterator[Instruction]:
    """All instructions before the padding."""
    for instruction in instructions(code, isa):
        if instruction.name == "s_code_end":
            return
        yield instruction


def _find_live(blocks: Mapping[int, Block]) -> None:
    """Set ``live`` of every block by liveness analysis: repeat until no set grows."""
    used, killed = {}, {}
    for start, block in blocks.items():
        reads: set[int] = set()
        writes: set[int] = set()
        for instruction in block.instructions:
            found = access(instruction)
            reads |= found.reads - writes
            # Lanes that take no part keep their values in vector registers.
            writes |= {number for number in found.writes if number < VECTOR_OFFSET}
        used[start], killed[start] = reads, writes
    entry = {start: frozenset(reads) for start, reads in used.items()}
    changed = True
    while changed:
        changed = False
        for start, block in reversed(list(blocks.items())):
            following = [entry[s] for s in block.successors if s in blocks]
            block.live = frozenset().union(*following)
            before = frozenset(used[start] | (block.live - killed[start]))
            if before != entry[start]:
                entry[start] = before
                changed = True


def needed(block: Block) -> Iterator[tuple[int, frozenset[int]]]:
    """For each instruction, the last first: its address, and the registers that an instruction
    after it may read."""
    live = block.live | {EXEC}
    for instruction in reversed(block.instructions):
        yield instruction.address, live
        found = access(instruction)
        live = live - {n for n in found.writes if n < VECTOR_OFFSET} | found.reads
