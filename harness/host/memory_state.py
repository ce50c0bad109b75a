"""What a server says of a model's device memory."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass
from reference.memory.planner import MemoryPlan


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The current ``plan``, the bytes ``given_back`` that other programs need, and how often that
    changed."""

    plan: MemoryPlan
    given_back: int
    changes: int
