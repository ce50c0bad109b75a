"""What is wanted of a request beside its tokens: asked of its replica, and received from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from contract.errors import RequestError
from contract.types import Request
from harness.digest import RowDigests, RunningDigest
from harness.serve.pooling import Pool
from harness.serve.prompt_scores import PromptScores
from harness.serve.replicas.work import RequestUpdate, Work
from harness.serve.submissions import BothSinks, Submission


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request, the grammar of its answer, and who receives what its replica finds."""

    request: Request
    grammar: str | None = None
    digest: RunningDigest | None = None
    scores: PromptScores | None = None
    pool: Pool | None = None
    leaves: RowDigests | None = None

    @classmethod
    def of(cls, request: Request, submission: Submission) -> Self:
        """What a submission wants of one of its requests. Raises RequestError for a receiver that
        cannot be sent."""
        sink = submission.logits.get(request.id)
        leaves: object = None
        if isinstance(sink, BothSinks):
            both: BothSinks = sink
            sink, leaves = both.first, both.second
        elif isinstance(sink, RowDigests):
            sink, leaves = None, sink
        if not isinstance(leaves, RowDigests | None):
            raise RequestError("logits", "stay where they are computed: on a replica")
        if not isinstance(sink, RunningDigest | Pool | None):
            raise RequestError("logits", "stay where they are computed: on a replica")
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
        """For a replica, after ``tokens``."""
        return Work(
            self.request,
            tokens,
            self.grammar,
            self.digest is not None,
            self.pool,
            self.leaves is not None,
        )

    def receive(self, batch: RequestUpdate) -> None:
        """What a replica has found."""
        if self.digest is not None:
            self.digest.note(batch.digested, batch.digests)
        if self.leaves is not None:
            self.leaves.note(batch.leaves_from, batch.leaves)
        if self.scores is not None and batch.scores:
            self.scores.note(batch.scores)
        if self.pool is not None and batch.pool is not None:
            self.pool.note(batch.pool)
