"""A running answer of a session with one user."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from contract.lazy_dataclass import dataclass
from contract.types import FinishReason, Request, SamplingParams
from harness.host.answer_text import NO_TOKENS, AnswerText, Piece
from harness.host.driver import EngineDriver
from harness.host.event_queue import TimedEvent
from harness.host.prompt_progress import PromptProgress
from harness.host.submissions import NO_MASKS
from harness.progress import SILENT, Progress
from reference.engine.sequence import LogitsSink
from reference.model.tokenizer import Tokenizer
from reference.runner import LOGITS

if TYPE_CHECKING:
    from harness.host.harmony_reply import FramedAnswer
    from harness.host.structured.grammars import TokenMasks


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Tokens and seconds of a generation.

    ``cached_tokens`` of the prompt came from the prefix cache. ``prefill_seconds`` end with the
    first token, ``decode_seconds`` begin there. ``decode_steps`` counts the tokens after the first,
    including one that ended the text. Of ``drafted`` tokens ``accepted`` were correct."""

    prompt_tokens: int
    cached_tokens: int
    prefill_seconds: float
    decode_steps: int
    decode_seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def prompt_rate(self) -> float:
        """Computed prompt tokens per second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, without the first one."""
        return _rate(self.decode_steps, self.decode_seconds)


class TextGeneration(Iterator[Piece]):
    """A running answer: iterate for its pieces, read its properties at any time. If the iteration
    stops early, for example by KeyboardInterrupt, call ``cancel``."""

    def __init__(
        self,
        driver: EngineDriver,
        tokenizer: Tokenizer,
        request: Request,
        progress: Progress = SILENT,
        on_logits: LogitsSink | None = None,
        output: str = LOGITS,
        framed: FramedAnswer | None = None,
        masks: Mapping[int, TokenMasks] = NO_MASKS,
    ) -> None:
        """Submits ``request``; raises RequestError if it cannot be served. ``on_logits`` receives
        the logits that tokens are sampled from, or the rows of ``output``. ``framed`` extracts the
        text from an answer in the harmony format, or from one that ``masks`` hold to a form."""
        self._engine = driver.engine
        self._request = request
        self._progress = progress
        self._framed = framed
        self._answer = AnswerText(
            tokenizer,
            request,
            parser=None if framed is None else framed.parser,
            shown=NO_TOKENS if framed is None else framed.shown_tokens,
            masks=masks.get(request.id),
        )
        self._reading: PromptProgress | None = None
        self._drafts_before = driver.engine.statistics.speculation
        logits = {} if on_logits is None else {request.id: on_logits}
        self._stream = driver.submit([request], logits, masks, output=output)
        self._started = time.monotonic()
        self._pieces = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def request(self) -> Request:
        """The engine request."""
        return self._request

    @property
    def tokens(self) -> list[int]:
        """The tokens of the text so far."""
        return self._answer.tokens

    @property
    def sampled(self) -> list[int]:
        """All tokens so far, including one that ended the text."""
        return self._answer.sampled

    @property
    def text(self) -> str:
        """The text so far."""
        return self._answer.text if self._framed is None else self._framed.content

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
        """Its sampling parameters."""
        return self._request.sampling

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far. Drafted tokens are those of all requests of the engine
        meanwhile."""
        answer, before = self._answer, self._drafts_before
        drafts = self._engine.statistics.speculation
        first = self._started if answer.first is None else answer.first
        return GenerationStats(
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._stream.facts[self._request.id].cached,
            prefill_seconds=first - self._started,
            decode_steps=max(0, len(answer.sampled) - 1),
            decode_seconds=0.0 if answer.latest is None else answer.latest - first,
            drafted=drafts.drafted - before.drafted,
            accepted=drafts.accepted - before.accepted,
        )

    def cancel(self) -> None:
        """Cancel the answer. Does nothing after its end."""
        if self.finish_reason is None:
            self._answer.finish_reason = FinishReason.CANCELLED
            self._stop_reading()
            self._stream.cancel()

    def _run(self) -> Iterator[Piece]:
        self._reading = PromptProgress(self._engine, self._request, self._progress)
        while self.finish_reason is None:
            for at, event in self._events():
                piece = self._answer.receive(event, self._stream, at)
                if piece is not None and self._framed is not None:
                    piece = piece._replace(text=self._framed.take(piece.parts))
                if piece is not None and (piece.text or piece.token is not None):
                    yield piece

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _events(self) -> list[TimedEvent]:
        """The events of a step. Before the first token, advances the progress of the prompt."""
        try:
            events = self._stream.take(0.0)
        except BaseException:
            self._stop_reading()
            raise
        if self._reading is not None:
            self._reading.look()
            if events:
                self._stop_reading()
        return events


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
