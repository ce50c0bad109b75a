"""A prompt under way: from the engine's events to completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import RequestError, ZincError
from contract.types import FinishReason, Request, TokenEvent
from harness.host.answer_text import AnswerText
from harness.host.driver import EventStream
from harness.host.reply import Part, ReplyParser
from harness.host.structured.grammars import TokenMasks
from harness.host.submissions import NO_MASKS, Submission
from reference.model.tokenizer import Tokenizer
from zinc_rt.outputs import Completion, Output, Piece
from zinc_rt.parameters import SamplingParams

if TYPE_CHECKING:
    from harness.serve.chat import ChatPlan


@dataclass(slots=True)
class _Choice:
    """One continuation in the making; ``parser`` takes its text apart."""

    answer: AnswerText
    parser: ReplyParser | None = None
    parts: list[Part] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def keep(self, first: int, rows: NDArray[np.float32]) -> None:
        """Called on the engine's thread, which uses ``rows`` again."""
        self.logits.extend(rows.copy())

    def read(self, text: str) -> None:
        """Take more text apart, which may end the answer: with the one call that it may make."""
        if self.parser is not None:
            self.parts += self.parser.feed(text)
            if self.parser.complete:
                self.answer.finish_reason = FinishReason.STOP

    def message(self) -> dict[str, Any] | None:
        """What a conversation goes on with."""
        if self.parser is None:
            return None
        from harness.serve.answers import message_of

        return message_of(self.parts)

    def completion(self, parameters: SamplingParams) -> Completion:
        """The finished continuation."""
        answer, events = self.answer, self.events
        assert answer.finish_reason is not None
        listed = _listed(events, parameters.listed)
        calls = self.parser is not None and self.parser.calls > 0
        stopped = answer.finish_reason is FinishReason.STOP
        return Completion(
            text=answer.text,
            tokens=tuple(answer.tokens),
            finish_reason="tool_calls" if calls and stopped else answer.finish_reason.value,
            stop_string=answer.stop_string,
            log_probabilities=listed[0],
            top_tokens=listed[1],
            top_log_probabilities=listed[2],
            logits=np.array(self.logits[: len(events)]) if parameters.logits else None,
            message=self.message(),
        )


def _listed(
    events: Sequence[TokenEvent], most: int | None
) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Log-probabilities of the events' tokens, and the ``most`` likeliest tokens with theirs."""
    if most is None:
        return None, None, None
    shape = (len(events), most)
    return (
        np.array([event.log_probability for event in events], np.float32),
        np.array([token for event in events for token, _ in event.top], np.int32).reshape(shape),
        np.array([value for event in events for _, value in event.top], np.float32).reshape(shape),
    )


class Pending:
    """A prompt's requests. Feed it their events; it is ``done`` after the last one."""

    def __init__(
        self,
        index: int,
        requests: Sequence[Request],
        parameters: SamplingParams,
        tokenizer: Tokenizer,
        plan: ChatPlan | None = None,
        masks: Mapping[int, TokenMasks] = NO_MASKS,
    ) -> None:
        """``plan`` says what answers are made of, ``masks`` by request which tokens may come next.
        Raises RequestError for stop strings that are not served."""
        self.index = index
        self.requests = requests
        self._parameters = parameters
        self._masks = masks
        shown = frozenset() if plan is None else plan.form.dialect.shown
        self._choices = {
            request.id: _Choice(
                AnswerText(tokenizer, request.stop, shown),
                None if plan is None else plan.parser(request),
            )
            for request in requests
        }
        self._left = len(requests)

    @property
    def done(self) -> bool:
        """Whether all of its completions have ended."""
        return self._left == 0

    @property
    def submission(self) -> Submission:
        """What the engine's driver is given."""
        kept: dict[int, Callable[[int, NDArray[np.float32]], None]] = {}
        if self._parameters.logits:
            kept = {number: choice.keep for number, choice in self._choices.items()}
        return Submission(self.requests, kept, masks=self._masks)

    def take(self, event: TokenEvent, stream: EventStream) -> Piece | None:
        """What became certain with an event. Raises ZincError when the model fails."""
        choice = self._choices[event.request_id]
        answer = choice.answer
        if answer.finish_reason is not None:
            return None
        known = len(answer.tokens)
        if event.token in self._parameters.stop_token_ids:
            # As if the engine had ended it; of what it computes behind, nothing is taken.
            if event.finish_reason is None:
                stream.cancel(event.request_id)
            event = event._replace(finish_reason=FinishReason.STOP)
        masks = self._masks.get(event.request_id)
        if event.finish_reason is FinishReason.ERROR and masks is not None:
            problem = masks.problem_after(answer.tokens)
            if problem is not None:
                raise RequestError("response_format", f"cannot be held to any longer: {problem}")
        text = answer.take(event)
        token = None
        if len(answer.tokens) > known:
            choice.events.append(event)
            token = event.token
        choice.read(text)
        if answer.finish_reason is not None:
            if event.finish_reason is None:
                stream.cancel(event.request_id)
            rest = answer.rest()
            choice.read(rest)
            if choice.parser is not None:
                choice.parts += choice.parser.finish()
            text += rest
            self._left -= 1
        return Piece(text, token) if text or token is not None else None

    def output(self, stream: EventStream) -> Output:
        """The result, once it is done."""
        first = self.requests[0]
        return Output(
            self.index,
            first.prompt,
            tuple(choice.completion(self._parameters) for choice in self._choices.values()),
            cached_tokens=stream.facts[first.id].cached,
        )

    def failed(self, error: ZincError) -> Output:
        """The result of a prompt that met an error."""
        return Output(self.index, self.requests[0].prompt, error=error)
