"""An answer in the making, of a session's one user."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from contract.lazy_dataclass import dataclass
from contract.types import FinishReason, Request, SamplingParams, TokenEvent
from harness.answer_text import AnswerText
from harness.progress import NullProgress, Progress

if TYPE_CHECKING:
    from reference.engine import Engine
    from reference.engine.sequence import LogitsSink
    from reference.model.open import Model

SILENT = NullProgress()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text that became certain with ``token``; the token is None for what comes at the end."""

    token: int | None
    text: str


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What a generation took, in tokens and seconds.

    ``cached_tokens`` of the prompt came from the prefix cache and were not computed.
    ``prefill_seconds`` lasts until the first token is there, ``decode_seconds`` from then on.
    ``decode_steps`` counts the tokens computed in that second part, one that ended the text
    included.
    """

    prompt_tokens: int
    cached_tokens: int
    prefill_seconds: float
    decode_steps: int
    decode_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Computed prompt tokens per second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, the first one apart."""
        return _rate(self.decode_steps, self.decode_seconds)


class EngineSession(Protocol):
    """A model and its engine, stepped on the caller's thread."""

    @property
    def model(self) -> Model:
        """The open model."""

    @property
    def engine(self) -> Engine:
        """The engine that runs its requests."""

    def step(self, request_id: int) -> list[TokenEvent]:
        """Run the engine's next step; the events of one request."""

    def reused(self, request_id: int) -> int:
        """Prompt tokens of a request that came from the prefix cache."""


class TextGeneration(Iterator[TextPiece]):
    """An answer in the making: iterate for its pieces, read the rest at any time.

    A KeyboardInterrupt, or whatever else stops the iteration, is followed by ``cancel``.
    """

    def __init__(
        self,
        session: EngineSession,
        request: Request,
        progress: Progress = SILENT,
        on_logits: LogitsSink | None = None,
        output: str | None = None,
    ) -> None:
        """Submits ``request``; raises RequestError when it cannot be served. ``on_logits`` receives
        the logits that its tokens are sampled from, or ``output`` of them."""
        self._session = session
        self._request = request
        self._progress = progress
        self._answer = AnswerText(session.model.tokenizer, request.stop)
        self._steps = self._read = 0
        self._reading = False
        self.sampled: list[int] = []
        """Every token so far, the one that ended the text included."""
        first = len(request.prompt) - 1 if on_logits else 0
        if output is None:
            session.engine.submit(request, on_logits, first)
        else:
            session.engine.submit(request, on_logits, first, output=output)
        self._started = self._first = self._latest = time.perf_counter()
        self._pieces = self._run()

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    @property
    def request(self) -> Request:
        """What was submitted."""
        return self._request

    @property
    def tokens(self) -> list[int]:
        """The tokens of the text so far."""
        return self._answer.tokens

    @property
    def text(self) -> str:
        """The text so far."""
        return self._answer.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._answer.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._answer.stop_string

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self._request.sampling

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far."""
        return GenerationStats(
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._session.reused(self._request.id),
            prefill_seconds=self._first - self._started,
            decode_steps=max(0, self._steps - 1),
            decode_seconds=self._latest - self._first,
        )

    def cancel(self) -> None:
        """Stop for good; harmless when finished."""
        if self.finish_reason is None:
            self._answer.finish_reason = FinishReason.CANCELLED
            self._progress.close()
            self._session.engine.cancel(self._request.id)

    def _run(self) -> Iterator[TextPiece]:
        self._start_progress()
        while self.finish_reason is None:
            for event in self._events():
                self._count_step()
                if event.token >= 0 and self.finish_reason is None:
                    self.sampled.append(event.token)
                known = len(self.tokens)
                text = self._answer.take(event)
                if self.stop_string is not None:
                    self._session.engine.cancel(self._request.id)
                if len(self.tokens) > known:
                    yield TextPiece(event.token, text)
        rest = self._answer.rest()
        if rest:
            yield TextPiece(None, rest)

    def _start_progress(self) -> None:
        """Show the reading of a prompt that takes several steps."""
        count = len(self._request.prompt)
        self._reading = count > self._session.engine.chunk_tokens
        if self._reading:
            self._progress.start("reading the prompt", count, "token")

    def _events(self) -> list[TokenEvent]:
        """What a step gave; until there is a token the progress of the prompt goes on."""
        try:
            events = self._session.step(self._request.id)
        except BaseException:
            self._progress.close()
            raise
        if self._reading:
            read = self._session.engine.progress(self._request.id)
            self._progress.advance(max(0, read - self._read))
            self._read = read
            if events:
                self._progress.close()
                self._reading = False
        return events

    def _count_step(self) -> None:
        self._latest = time.perf_counter()
        if self._steps == 0:
            self._first = self._latest
        self._steps += 1


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
