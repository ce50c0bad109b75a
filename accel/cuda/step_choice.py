"""Decides when launches of a step become one persistent launch, and which block shapes are tried.

A dense model's step of one token is one launch where that is faster. The environment variable
``ZINC_RT_CUDA_STEP`` is ``auto`` for that choice, warps and ring slots of a block, such as ``8x3``,
to join launches wherever possible, or empty to join none."""

from __future__ import annotations

import re
from dataclasses import dataclass

from accel.cuda.attention import HEADS
from contract.arithmetic import KV_TILE
from contract.errors import ConfigError

VARIABLE = "ZINC_RT_CUDA_STEP"
AUTO = "auto"
LEAST_PHASES = 3
"""Fewest phases of a persistent launch; fewer are faster as launches that overlap."""
MOST_TOKENS = 4
"""Most tokens of a step as one launch."""
BLOCKS = ((8, 3), (8, 2), (8, 1), (4, 2), (4, 1))
"""Warps and ring slots of a block, tried in this order."""
Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Decide which launches are joined.

    ``blocks`` are the warps and slots to try, none to join nothing; runs have ``least_phases``
    phases of ``most_tokens`` tokens, on devices of ``least_capability``. Where the longest
    normalized row has fewer units than ``least_row_units``, only steps that sample a position
    before ``long_position`` are joined."""

    blocks: tuple[Block, ...] = ()
    most_tokens: int = MOST_TOKENS
    least_phases: int = LEAST_PHASES
    least_capability: tuple[int, int] = (0, 0)
    least_row_units: int = 0
    long_position: int = 0


NEVER = StepChoice()
FASTEST = StepChoice(BLOCKS, 1, 10, (9, 0), 9, 2 * KV_TILE + 1)
"""The choice measured to be faster: not with four tokens, nor between launches of other kinds.
Where a warp normalizes a single unit of a row, it is faster as long as one block computes a whole
context: with rows of 4 units (0.6B) launches of their own are 6 % slower at context 5 and 5 %
faster at 512. With 16 units (8B) one launch is 5 % faster at 5."""


def chosen_step(choice: str) -> StepChoice:
    """The choice for a value of the variable. A kernel whose block needs too much memory takes the
    next shape. Raises ConfigError naming the value."""
    if not choice:
        return NEVER
    if choice == AUTO:
        return FASTEST
    found = re.fullmatch(r"(\d+)x(\d+)", choice)
    block = (int(found[1]), int(found[2])) if found else (0, 0)
    if block[0] not in range(HEADS, 17) or block[1] not in range(1, 9):
        raise ConfigError(f"{VARIABLE}: {choice!r} is neither {AUTO!r} nor 4 to 16 warps x slots")
    return StepChoice((block, *BLOCKS))
