"""The receivers of what an engine in another process computes for a request besides its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from contract.types import Request
from harness.digest import RowDigests, RunningDigest
from harness.host.pooling import Pool
from harness.host.remote.work import Results, Work
from harness.host.submissions import BothSinks, Submission
from reference.engine.sequence import LogitsSink
from reference.expert_outputs import ExpertSink
from reference.sched.scores import ScoreSink


@dataclass(frozen=True, slots=True)
class Receivers:
    """The receivers of one request's results: running digest, row digests, pool, or any other
    receiver of ``rows``; scores and experts. ``work`` is the message that asks for them."""

    work: Work
    digest: RunningDigest | None = None
    leaves: RowDigests | None = None
    pool: Pool | None = None
    rows: LogitsSink | None = None
    scores: ScoreSink | None = None
    experts: ExpertSink | None = None

    @classmethod
    def of(cls, request: Request, submission: Submission) -> Self:
        """The part of a submission about one of its requests."""
        number = request.id
        sink: Any = submission.logits.get(number)
        leaves = None
        if isinstance(sink, BothSinks) and isinstance(sink.second, RowDigests):
            sink, leaves = sink.first, sink.second
        elif isinstance(sink, RowDigests):
            sink, leaves = None, sink
        masks = submission.masks.get(number)
        scores, experts = submission.scores.get(number), submission.experts.get(number)
        digest = sink if isinstance(sink, RunningDigest) else None
        pool = sink if isinstance(sink, Pool) else None
        rows = submission.logits.get(number) if sink is not None and not (digest or pool) else None
        if rows is not None:
            leaves = None
        work = Work(
            request,
            grammar=None if masks is None else masks.grammar,
            output=submission.output,
            rows_from=submission.logits_from,
            digested=digest is not None,
            leaf=None if leaves is None else leaves.digest,
            pool=pool,
            rows=rows is not None,
            scored=scores is not None,
            experts=experts is not None,
        )
        return cls(work, digest, leaves, pool, rows, scores, experts)

    def receive(self, results: Results) -> None:
        """Pass results to the receivers."""
        if self.digest is not None:
            self.digest.note(results.digested, results.digests)
        if self.leaves is not None:
            self.leaves.note(results.leaves_from, results.leaves)
        if self.pool is not None and results.pool is not None:
            self.pool.note(results.pool)
        if self.rows is not None:
            for first, rows in results.rows:
                self.rows(first, rows)
        if self.experts is not None:
            for first, ids in results.experts:
                self.experts(first, ids)
        if self.scores is not None:
            for scores in results.scores:
                self.scores(scores)
