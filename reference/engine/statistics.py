"""Where an engine stands, in numbers."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass
from reference.engine.drafter import SpeculationStatistics
from reference.memory.prefix import PrefixStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Where an engine stands: requests and pages now, steps and preemptions since it began."""

    slots: int
    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    steps: int
    admitted: int
    preempted: int
    prefix: PrefixStatistics
    speculation: SpeculationStatistics
