"""Decides when launches of a step become one persistent launch, and which block shapes are tried.

The environment variable ``ZINC_RT_CUDA_STEP`` is ``auto`` to join the launches where that was
measured to be faster, mostly a dense model's step of one token; warps and ring slots of a block,
such as ``8x3``, to join them wherever possible; or empty to join none."""

from __future__ import annotations

import re
from dataclasses import dataclass

from accel.cuda.attention import HEADS
from contract.arithmetic import KV_TILE
from contract.errors import ConfigError

VARIABLE = "ZINC_RT_CUDA_STEP"
AUTO = "auto"
MIN_PHASES = 3
"""Fewest phases of a persistent launch; fewer are faster as launches that overlap."""
MAX_TOKENS = 4
"""Most tokens of a step as one launch."""
BLOCKS = ((8, 3), (8, 2), (8, 1), (4, 2), (4, 1))
"""Warps and ring slots of a block, tried in this order."""
MAX_WARPS, MAX_SLOTS = 16, 8
Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Which runs of launches become one persistent launch each.

    ``blocks`` are the block shapes to try in order, none to join nothing. A run has at least
    ``min_phases`` phases and at most ``max_tokens`` tokens; the device has at least compute
    capability ``min_capability``. Where the longest row that the run normalizes has fewer than
    ``min_row_units`` units of 256 elements, only steps that sample a position before
    ``long_position`` run the joined launch. ``with_mps`` says whether launches are joined although
    kernels of other processes may run at the same time, which wait long for a joined launch."""

    blocks: tuple[Block, ...] = ()
    max_tokens: int = MAX_TOKENS
    min_phases: int = MIN_PHASES
    min_capability: tuple[int, int] = (0, 0)
    min_row_units: int = 0
    long_position: int = 0
    with_mps: bool = True


NEVER = StepChoice()
FASTEST = StepChoice(BLOCKS, 1, 10, (9, 0), 9, 2 * KV_TILE + 1, with_mps=False)
"""The choice measured to be faster: not with four tokens, nor between launches of other kinds.
Where a warp normalizes a single unit of a row, it is faster as long as one block computes a whole
context: with rows of 4 units (0.6B) launches of their own are 6 % slower at context 5 and 5 %
faster at 512. With 16 units (8B) one launch is 5 % faster at 5."""


def chosen_step(choice: str) -> StepChoice:
    """The choice for value ``choice`` of the variable. The shapes of BLOCKS follow a shape of the
    caller's, for kernels whose block would need too much memory. Raises ConfigError naming the
    value."""
    if not choice:
        return NEVER
    if choice == AUTO:
        return FASTEST
    match = re.fullmatch(r"(\d+)x(\d+)", choice)
    warps, slots = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (HEADS <= warps <= MAX_WARPS and 1 <= slots <= MAX_SLOTS):
        shapes = f"{HEADS} to {MAX_WARPS} warps x 1 to {MAX_SLOTS} slots"
        raise ConfigError(f"{VARIABLE}: {choice!r} is neither {AUTO!r} nor {shapes}")
    return StepChoice(((warps, slots), *BLOCKS))
