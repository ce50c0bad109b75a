"""Prompts without generation: for scores, hidden states and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from contract.arrays import Floats
from contract.errors import NonFiniteLogits, ZincError
from contract.types import Request, SamplingParams, TokenEvent
from harness.host.answer_text import failure_of
from harness.host.collectors import ExpertChoices
from harness.host.pooling import Pool
from harness.host.stream_driver import EventStream
from harness.host.submissions import Submission
from harness.named_adapters import Scales
from reference.runner import HIDDEN
from reference.sched.scores import TokenScores
from zinc_rt.outputs import Score

UNPENALIZED = SamplingParams(repeat_last_n=0)


class Reading:
    """A text that the engine reads. It is done with the last event of its single request."""

    ends_early = False

    def __init__(self, request: Request) -> None:
        self.requests: Sequence[Request] = (request,)
        self.done = False

    def use(self, adapters: Scales) -> None:
        """Use these adapters."""
        self.requests = [replace(request, adapters=adapters) for request in self.requests]

    def take(self, event: TokenEvent, stream: EventStream) -> None:
        """Take the next event. Raises NonFiniteLogits if the model fails."""
        failure = failure_of(event)
        if failure is not None:
            raise failure
        self.done = event.finish_reason is not None


class Scoring(Reading):
    """A text to score, number ``index`` of a call: tokens from position ``start`` on, ``top``
    likely tokens at each position, and optionally the experts used."""

    def __init__(
        self,
        index: int,
        tokens: Sequence[int],
        start: int,
        top: int,
        id: int,
        experts: bool = False,
    ) -> None:
        super().__init__(
            Request(
                id,
                tuple(tokens),
                max_tokens=0,
                sampling=UNPENALIZED,
                score_from=None if len(tokens) == start == 1 else start,
                score_top=top if top else 1,  # the first says which token is the likeliest
            )
        )
        self._index, self._start, self._top = index, start, top
        self._parts: list[TokenScores] = []
        self._experts = ExpertChoices() if experts else None

    @property
    def submission(self) -> Submission:
        """The submission to the engine's driver."""
        (request,) = self.requests
        experts = {} if self._experts is None else {request.id: self._experts}
        scores = {} if request.score_from is None else {request.id: self._parts.append}
        return Submission(self.requests, scores=scores, experts=experts)

    def output(self, stream: EventStream) -> Score:
        """The scores, after the last event."""
        (request,) = self.requests
        score = unscored(self._index, request.prompt, self._start, self._top)
        for part in self._parts:
            rows = slice(part.first, part.first + len(part.log_probability))
            score.log_probabilities[rows] = part.log_probability
            score.top_tokens[rows] = part.top_ids[:, : self._top]
            score.top_log_probabilities[rows] = part.top_log_probabilities[:, : self._top]
            score.likeliest[rows] = part.top_ids[:, 0] == np.array(request.prompt[rows])
        used = None if self._experts is None else self._experts.of(len(request.prompt))
        return replace(score, cached_tokens=stream.facts[request.id].cached, experts=used)

    def failed(self, error: ZincError) -> Score:
        """The result of a text that failed."""
        return unscored(self._index, self.requests[0].prompt, 0, 0, error)


def unscored(
    index: int, tokens: Sequence[int], start: int, top: int, error: ZincError | None = None
) -> Score:
    """A score without results: NaN and -1 in every row."""
    count = len(tokens)
    return Score(
        index,
        tuple(tokens),
        start,
        np.full(count, np.nan, np.float32),
        np.full((count, top), -1, np.int32),
        np.full((count, top), np.nan, np.float32),
        np.zeros(count, np.bool_),
        error=error,
    )


class HiddenStates(Reading):
    """A text, number ``index`` of a call, whose rows before the output matrix are kept."""

    def __init__(self, index: int, tokens: Sequence[int], width: int, id: int) -> None:
        super().__init__(Request(id, tuple(tokens), max_tokens=0, sampling=UNPENALIZED))
        self._index = index
        self._rows = np.empty((len(tokens), width), np.float32)

    @property
    def submission(self) -> Submission:
        """The submission to the engine's driver."""
        (request,) = self.requests
        return Submission(self.requests, {request.id: self._keep}, 0, HIDDEN)

    def output(self, stream: EventStream) -> tuple[int, Floats]:
        """The number of the text, and a row for each of its tokens."""
        if not np.isfinite(self._rows).all():
            raise NonFiniteLogits("a hidden state is not finite; the model file is damaged")
        return self._index, self._rows

    def failed(self, error: ZincError) -> tuple[int, Floats]:
        """Raise the error: an array has no place for it."""
        raise error

    def _keep(self, first: int, rows: Floats) -> None:
        self._rows[first : first + len(rows)] = rows


class Embedding(Reading):
    """A text to embed: ``pool`` reduces its hidden states to ``vector``, float32[width]."""

    def __init__(self, tokens: Sequence[int], pool: Pool, vector: Floats, id: int) -> None:
        super().__init__(Request(id, tuple(tokens), max_tokens=0, sampling=UNPENALIZED))
        self._pool, self._vector = pool, vector

    @property
    def submission(self) -> Submission:
        """The submission to the engine's driver."""
        (request,) = self.requests
        sinks = {request.id: self._pool}
        return Submission(self.requests, sinks, self._pool.rows_from, HIDDEN)

    def output(self, stream: EventStream) -> Floats:
        """The vector."""
        try:
            self._vector[:] = self._pool.vector(len(self._vector))
        except ValueError as error:
            raise NonFiniteLogits(f"{error}; the model file is damaged") from None
        return self._vector

    def failed(self, error: ZincError) -> Floats:
        """Raise the error: an array of vectors has no place for it."""
        raise error
