"""The messages between the server and a replica; see also ``harness.host.remote.work``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contract.errors import ZincError
from contract.types import TokenEvent
from harness.host.remote.work import NO_RESULTS, Results
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.memory.prefix import Difference


@dataclass(frozen=True, slots=True)
class Question:
    """A function to call with the engine of one replica, or of any if ``replica`` is empty."""

    replica: str
    ask: Callable[[Engine], Any]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The answer of a request ends after its first ``used`` tokens; its replica counts no later
    ones."""

    replica: str
    request_id: int
    used: int


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """A replica's update about a request: new events, results and facts, and the counts of its
    engine. The first update has no events and says that the request was accepted."""

    replica: str
    events: tuple[TokenEvent, ...]
    cached: int
    preempted: int
    admitted: bool
    statistics: EngineStatistics
    results: Results = NO_RESULTS
    difference: Difference | None = None
    from_disk: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of the engine of a replica, instead of an update."""

    error: ZincError
    replica: str
