"""The messages between the server and a replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from contract.errors import ZincError
from contract.types import Request, TokenEvent
from harness.host.pooling import Pool
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.memory.prefix import Difference


@dataclass(frozen=True, slots=True)
class Work:
    """A request for a replica; ``tokens`` of its answer were computed elsewhere. Its tokens follow
    ``grammar``. It may also need digests of logits, receipt leaves, log-probabilities from
    ``score_from`` on, or the vector that ``pool`` makes of hidden states."""

    request: Request
    tokens: tuple[int, ...] = ()
    grammar: str | None = None
    digested: bool = False
    pool: Pool | None = None
    leaves: bool = False

    @property
    def left(self) -> Request:
        """The rest of the request: the same request with the known tokens added to its prompt.

        Keys and values depend only on the tokens before them, and sampling is keyed by seed and
        position. So the next token is the same on any engine."""
        if not self.tokens:
            return self.request
        return replace(
            self.request,
            prompt=(*self.request.prompt, *self.tokens),
            max_tokens=self.request.max_tokens - len(self.tokens),
            force_tokens=self.request.force_tokens[len(self.tokens) :],
            min_tokens=max(0, self.request.min_tokens - len(self.tokens)),
        )


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
    """A replica's update about a request: new events and facts, and the counts of its engine. The
    first update has no events and says that the request was accepted. ``digests`` begin at row
    ``digested``, ``leaves`` at row ``leaves_from``. ``scores`` come once, ``pool`` with the last
    event."""

    replica: str
    events: tuple[TokenEvent, ...]
    cached: int
    preempted: int
    admitted: bool
    statistics: EngineStatistics
    digested: int = 0
    digests: tuple[str, ...] = ()
    scores: tuple[TokenEvent, ...] = ()
    pool: Pool | None = None
    difference: Difference | None = None
    leaves_from: int = 0
    leaves: tuple[str, ...] = ()
    from_disk: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of the engine, instead of an update."""

    error: ZincError
