"""The messages of an engine's process to the process of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contract.types import Tenant
from harness.host.hosted import Placement
from harness.host.memory_state import MemoryState
from harness.host.remote.work import Results
from harness.host.submissions import EndMessages
from reference.engine.statistics import EngineStatistics
from reference.memory.prefix import Difference


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine's process is started with: the tenants, the messages for clients, the folder
    whose pages of removed tenants are deleted, and the level of the server's log."""

    tenants: Sequence[Tenant]
    words: EndMessages
    disk_cache: Path | None
    log_level: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of a model's engine; that of its device's memory, None if it did not change; and
    why its trace cannot be written."""

    statistics: EngineStatistics
    memory: MemoryState | None
    trace_problem: str | None


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that was opened. ``key`` names its engine."""

    key: str
    placed: Placement
    traced: bool
    status: EngineState


class SentFacts(NamedTuple):
    """The facts of a request that the engine's thread notes; see ``RequestFacts``."""

    request_id: int
    admitted: float | None
    cached: int
    from_disk: int
    difference: Difference | None
    preempted: int


@dataclass(frozen=True, slots=True)
class Step:
    """What happened in the engine ``key`` since its last message, in this order: submissions were
    answered, each with an error or None for each of its groups; facts and results of requests
    changed; steps took seconds for a number of tokens; and at the time ``at`` there were events,
    the fields of a ``TokenEvent`` each."""

    key: str
    at: float
    events: Sequence[tuple[Any, ...]] = ()
    answers: Sequence[tuple[int, Sequence[Exception | None]]] = ()
    facts: Sequence[SentFacts] = ()
    results: Sequence[tuple[int, Results]] = ()
    steps: Sequence[tuple[float, int]] = ()
    status: EngineState | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine ``key`` ended, for a reason."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    """The answer to question ``number``: the error that was raised, or the result."""

    number: int
    error: BaseException | None = None
    result: Any = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A call of the progress display of question ``number``."""

    number: int
    method: str
    arguments: tuple[Any, ...] = field(default=())
