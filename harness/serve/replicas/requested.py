"""What is wanted of a request beside its tokens: asked of its replica, and received from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from contract.errors import RequestError
from contract.types import Request
from harness.digest import RunningDigest
from harness.host.pooling import Pool
from harness.host.prompt_scores import PromptScores
from harness.host.submissions import Submission
from harness.serve.replicas.work import RequestUpdate, Work


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request, the grammar of its answer, and who receives what its replica finds."""

    request: Request
    grammar: str | None = None
    digest: RunningDigest | None = None
    scores: PromptScores | None = None
    pool: Pool | None = None

    @classmethod
    def of(cls, request: Request, submission: Submission) -> Self:
        """What a submission wants of one of its requests. Raises RequestError for a receiver that
        cannot be sent."""
        sink = submission.logits.get(request.id)
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
        )

    def work(self, tokens: tuple[int, ...]) -> Work:
        """For a replica, after ``tokens``."""
        return Work(
            self.request,
            tokens,
            self.grammar,
            self.digest is not None,
            self.pool,
        )

    def receive(self, batch: RequestUpdate) -> None:
        """What a replica has found."""
        if self.digest is not None:
            self.digest.note(batch.digested, batch.digests)
        if self.scores is not None and batch.scores:
            self.scores.note(batch.scores)
        if self.pool is not None and batch.pool is not None:
            self.pool.note(batch.pool)
