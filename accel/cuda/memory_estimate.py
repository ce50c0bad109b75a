"""What a graph takes on a device, kept in a folder, so that a start lowers no form before its time.

See ``accel.packets.estimate_cache``: what is kept is found by all it follows from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accel.cuda
from accel.cuda.driver import TIER
from accel.packets.estimate_cache import EstimateCache, code_state, decoded_memory, encoded_memory
from accel.packets.footprint import StepMemory
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What all forms of a graph take, their kernels' own workspaces beside it, and the most that
    launches of a form pass on.

    ``factors`` are buffers some product reads: those that are arranged when they are uploaded.
    ``divided`` are those of which each device holds its share of the rows.
    """

    steps: StepMemory
    workspace_bytes: int
    passing_bytes: int
    factors: frozenset[str]
    divided: frozenset[str]


def cached_estimate(
    folder: Path | None,
    parameters: tuple[object, ...],
    graph: Graph,
    largest: ShapeKey,
    make: Callable[[], MemoryEstimate],
) -> MemoryEstimate:
    """What is kept of the needs of ``graph``, else what ``make`` says. ``parameters`` are what
    forms are planned with beside the graph; their ``repr`` says all of them."""
    code = code_state((accel.cuda,))
    if folder is None or code is None:
        return make()
    kept = EstimateCache(folder, (TIER, repr(parameters), code), _encoded, _decoded)
    return kept.of(graph, largest, make)


def _encoded(needs: MemoryEstimate) -> list[Any]:
    factors, divided = sorted(needs.factors), sorted(needs.divided)
    own = [needs.workspace_bytes, needs.passing_bytes]
    return [encoded_memory(needs.steps), *own, factors, divided]


def _decoded(data: Any) -> MemoryEstimate:
    steps, own, passing, factors, divided = data
    return MemoryEstimate(
        decoded_memory(steps), own, passing, frozenset(factors), frozenset(divided)
    )
