"""The counts of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from contract.lazy_dataclass import dataclass
from reference.engine.drafter import SpeculationStatistics
from reference.memory.prefix import PrefixStatistics

if TYPE_CHECKING:
    from reference.memory.disk.statistics import DiskStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts of an engine: requests and pages now; steps and preemptions since its creation.
    ``disk`` is None without a disk cache."""

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
    disk: DiskStatistics | None = None
