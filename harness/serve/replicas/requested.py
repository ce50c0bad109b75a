"""The results of a request besides tokens that its replica computes, and their receivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from contract.errors import RequestError
from contract.types import Request
from harness.digest import RowDigests, RunningDigest
from harness.host.collectors import PromptScores
from harness.host.pooling import Pool
from harness.host.submissions import BothSinks, Submission
from harness.serve.replicas.work import RequestUpdate, Work


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request with its grammar, and the receivers of its replica's results."""

    request: Request
    grammar: str | None = None
    digest: RunningDigest | None = None
    scores: PromptScores | None = None
    pool: Pool | None = None
    leaves: RowDigests | None = None

    @classmethod
    def of(cls, request: Request, submission: Submission) -> Self:
        """The part of a submission about one of its requests. Raises RequestError for a receiver
        that cannot run on a replica."""
        sink: object = submission.logits.get(request.id)
        leaves = None
        if isinstance(sink, BothSinks) and isinstance(sink.second, RowDigests):
            leaves = sink.second
            sink = sink.first
        elif isinstance(sink, RowDigests):
            leaves = sink
            sink = None
        if not isinstance(sink, RunningDigest | Pool | None):
            raise RequestError("logits", "stay where they are computed: on a replica")
        if request.id in submission.experts:
            raise RequestError("experts", "stay where they are computed: on a replica")
        scores = submission.scores.get(request.id)
        masks = submission.masks.get(request.id)
        return cls(
            request,
            None if masks is None else masks.grammar,
            sink if isinstance(sink, RunningDigest) else None,
            scores if isinstance(scores, PromptScores) else None,
            sink if isinstance(sink, Pool) else None,
            leaves,
        )

    def work(self, tokens: tuple[int, ...]) -> Work:
        """The message to a replica; ``tokens`` of the answer are already known."""
        return Work(
            self.request,
            tokens,
            self.grammar,
            self.digest is not None,
            self.pool,
            self.leaves is not None,
        )

    def receive(self, batch: RequestUpdate) -> None:
        """Pass a replica's results to the receivers."""
        if self.digest is not None:
            self.digest.note(batch.digested, batch.digests)
        if self.leaves is not None:
            self.leaves.note(batch.leaves_from, batch.leaves)
        if self.scores is not None and batch.scores:
            self.scores.note(batch.scores)
        if self.pool is not None and batch.pool is not None:
            self.pool.note(batch.pool)
