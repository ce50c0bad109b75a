"""A request as it is sent to an engine in another process, and the results that come back besides
its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from contract.arrays import Floats, Ints
from contract.lazy_dataclass import dataclass
from contract.types import Request
from harness.digest import RowDigests, RunningDigest
from harness.host.pooling import Pool
from harness.host.structured.grammars import Grammars
from harness.host.submissions import BothSinks, Submission
from reference.engine.sequence import LogitsSink
from reference.runner import LOGITS
from reference.sched.scores import TokenScores

Values = TypeVar("Values")


@dataclass(frozen=True, slots=True)
class Work:
    """A request for another process; ``tokens`` of its answer were computed elsewhere. Its tokens
    follow ``grammar``.

    From position ``rows_from`` on the rows of ``output`` are computed into: digests of all rows so
    far (``digested``), what the function ``leaf`` makes of each row, the vector that ``pool`` makes
    of all; or they are returned themselves (``rows``). It may also need the log-probabilities of
    its prompt (``scored``), and the ``experts`` used at each position."""

    request: Request
    tokens: tuple[int, ...] = ()
    grammar: str | None = None
    output: str = LOGITS
    rows_from: int | None = None
    digested: bool = False
    leaf: Callable[[Floats], str] | None = None
    pool: Pool | None = None
    rows: bool = False
    scored: bool = False
    experts: bool = False

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

    @property
    def returns_results(self) -> bool:
        """Whether anything besides tokens is returned."""
        return bool(
            self.digested or self.leaf or self.pool or self.rows or self.scored or self.experts
        )


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a request since the last ones. ``digests`` begin at row ``digested``,
    ``leaves`` at row ``leaves_from``. ``scores``, ``experts`` and ``rows`` are the arguments of the
    calls of their receivers. ``pool`` comes with the last event."""

    digested: int = 0
    digests: tuple[str, ...] = ()
    leaves_from: int = 0
    leaves: tuple[str, ...] = ()
    scores: tuple[TokenScores, ...] = ()
    experts: tuple[tuple[int, Ints], ...] = ()
    rows: tuple[tuple[int, Floats], ...] = ()
    pool: Pool | None = None


NO_RESULTS = Results()


def _all_taken(kept: list[Values]) -> tuple[Values, ...]:
    """What a list has, which is empty then. Another thread may append meanwhile, so it stays the
    same list."""
    taken = tuple(kept)
    del kept[: len(taken)]
    return taken


class _KeptCalls(Generic[Values]):
    """Keeps the arguments of calls until they are sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Values]] = []

    def __call__(self, first: int, values: Values) -> None:
        self.calls.append((first, values))

    def taken(self) -> tuple[tuple[int, Values], ...]:
        """What was kept since the last call."""
        return _all_taken(self.calls)


class Job:
    """A request in the process of its engine, and its collected results. Raises GrammarRefused,
    GrammarsBusy and GrammarBroke for a grammar that does not compile here."""

    def __init__(self, work: Work, grammars: Grammars) -> None:
        self.work = work
        self.request = work.left
        self.mask = None
        if work.grammar is not None:
            (self.mask,) = grammars.masks(work.grammar, 1, checked=True)
            self.mask.before = work.tokens
            # The first mask is computed ahead, not on the engine's thread.
            self.mask([])
        self._digest = RunningDigest() if work.digested else None
        self._leaves = RowDigests(work.leaf) if work.leaf is not None else None
        self._rows, self._experts = _KeptCalls[Floats](), _KeptCalls[Ints]()
        self._scores: list[TokenScores] = []
        self._digests_sent = self._leaves_sent = 0

    @property
    def sink(self) -> LogitsSink | None:
        """The receiver of the request's rows."""
        first: LogitsSink | None = self._digest or self.work.pool
        if self.work.rows:
            first = self._rows
        if self._leaves is None or first is None:
            return first or self._leaves
        return BothSinks(first, self._leaves)

    def results(self, ended: bool) -> Results:
        """The results since the last call; ``ended`` says that there will be no more."""
        digested, digests = self._digests_sent, tuple[str, ...]()
        if self._digest is not None:
            digests = tuple(self._digest.digests[digested:])
        leaves_from, leaves = self._leaves_sent, tuple[str, ...]()
        if self._leaves is not None:
            leaves = tuple(self._leaves.since(leaves_from))
        self._digests_sent += len(digests)
        self._leaves_sent += len(leaves)
        return Results(
            digested,
            digests,
            leaves_from,
            leaves,
            _all_taken(self._scores),
            self._experts.taken(),
            self._rows.taken(),
            self.work.pool if ended else None,
        )


def submission_of(jobs: Sequence[Job]) -> Submission:
    """The submission of jobs that are accepted together, whose rows are of the same output."""
    first = jobs[0].work
    rows_from = first.rows_from
    if rows_from is None and first.tokens:
        # Digests begin with the answer, also where its first tokens are known.
        rows_from = len(first.request.prompt) - 1
    return Submission(
        [job.request for job in jobs],
        {job.request.id: sink for job in jobs if (sink := job.sink) is not None},
        rows_from,
        first.output,
        {job.request.id: job.mask for job in jobs if job.mask is not None},
        {job.request.id: job._scores.append for job in jobs if job.work.scored},
        {job.request.id: job._experts for job in jobs if job.work.experts},
    )
