"""When launches of a step are put together as one, and what blocks it is tried with first.

A dense model's step of one token is one launch where that is faster than those it replaces. The
environment variable ``ZINC_RT_CUDA_STEP`` says how many warps and ring slots a block has, ``8x3``,
wherever launches can be put together, ``auto`` that this is left to us, and nothing that none are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from accel.cuda.attention import HEADS
from contract.arithmetic import KV_TILE
from contract.errors import ConfigError

VARIABLE = "ZINC_RT_CUDA_STEP"
AUTO = "auto"
LEAST_PHASES = 3
"""Fewer are faster as launches that begin before the one in front has ended."""
MOST_TOKENS = 4
"""That a step as one launch has room for."""
BLOCKS = ((8, 3), (8, 2), (8, 1), (4, 2), (4, 1))
"""Warps and ring slots of a block that ``auto`` tries in turn."""
Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepChoice:
    """``blocks`` are what to try for warps and slots, none where nothing is put together; runs have
    ``least_phases`` of ``most_tokens``, on devices of ``least_capability``. Where rows with a norm
    are shorter than ``least_row_units``, the longest of them, only steps that sample a position
    before ``long_position`` are put together."""

    blocks: tuple[Block, ...] = ()
    most_tokens: int = MOST_TOKENS
    least_phases: int = LEAST_PHASES
    least_capability: tuple[int, int] = (0, 0)
    least_row_units: int = 0
    long_position: int = 0


NEVER = StepChoice()
FASTEST = StepChoice(BLOCKS, 1, 10, (9, 0), 9, 2 * KV_TILE + 1)
"""Where it has been measured to be faster: not with four tokens, nor between launches of others.
Where a warp has a single unit of a row to normalize it is so as long as one block takes a whole
context: of 4 units (0.6B) the graph is 6 % slower at context 5 and 5 % faster at 512. Of 16 (8B)
one launch is 5 % faster at 5."""


def chosen_step(choice: str) -> StepChoice:
    """What the variable says. A kernel for which a chosen block is too much memory takes the next.

    Raises ConfigError naming it.
    """
    if not choice:
        return NEVER
    if choice == AUTO:
        return FASTEST
    found = re.fullmatch(r"(\d+)x(\d+)", choice)
    block = (int(found[1]), int(found[2])) if found else (0, 0)
    if block[0] not in range(HEADS, 17) or block[1] not in range(1, 9):
        raise ConfigError(f"{VARIABLE}: {choice!r} is neither {AUTO!r} nor 4 to 16 warps x slots")
    return StepChoice((block, *BLOCKS))
