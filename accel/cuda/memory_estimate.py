"""Caches the memory that a graph needs on a device, so that a start need not lower every bucket.

See ``accel.packets.estimate_cache``: the key of an entry is everything its value depends on."""

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
    """The memory of all buckets of a graph.

    ``workspace_bytes`` are the workspaces of all buckets whose contents last from step to step;
    ``transient_bytes`` are the largest workspaces of one bucket whose contents do not. ``factors``
    are the buffers that some product reads, which are arranged when they are uploaded. ``divided``
    are those of which each device has a share of the rows."""

    steps: StepMemory
    workspace_bytes: int
    transient_bytes: int
    factors: frozenset[str]
    divided: frozenset[str]


def cached_estimate(
    folder: Path | None,
    parameters: tuple[object, ...],
    graph: Graph,
    largest: ShapeKey,
    make: Callable[[], MemoryEstimate],
) -> MemoryEstimate:
    """The cached estimate for ``graph``, else that of ``make``. The ``repr`` of ``parameters``
    identifies all inputs of planning other than the graph."""
    code = code_state((accel.cuda,))
    if folder is None or code is None:
        return make()
    cache = EstimateCache(folder, (TIER, repr(parameters), code), _encoded, _decoded)
    return cache.of(graph, largest, make)


def _encoded(needs: MemoryEstimate) -> list[Any]:
    factors, divided = sorted(needs.factors), sorted(needs.divided)
    own = [needs.workspace_bytes, needs.transient_bytes]
    return [encoded_memory(needs.steps), *own, factors, divided]


def _decoded(data: Any) -> MemoryEstimate:
    steps, own, transient, factors, divided = data
    return MemoryEstimate(
        decoded_memory(steps), own, transient, frozenset(factors), frozenset(divided)
    )
