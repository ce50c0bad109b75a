"""A running prompt: turns the engine's events into completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from contract.arrays import Floats, Ints
from contract.errors import RequestError, ZincError
from contract.types import Request, TokenEvent
from harness.host.answer_text import AnswerText
from harness.host.answer_text import Piece as AnswerPiece
from harness.host.collectors import ExpertChoices
from harness.host.harmony_reply import content_of
from harness.host.reply_parts import Part
from harness.host.stream_driver import EventStream
from harness.host.structured.grammars import GrammarBroke, TokenMasks
from harness.host.submissions import NO_MASKS, Submission
from reference.model.tokenizer import Tokenizer
from zinc_rt.outputs import Completion, Output, Piece
from zinc_rt.parameters import SamplingParams

if TYPE_CHECKING:
    from harness.serve.chat import ChatPlan


@dataclass(slots=True)
class _Choice:
    """One continuation: its answer so far, and the data of its completion. The text of a ``framed``
    (harmony) answer comes from its parts. Without ``listed`` log-probabilities its events are not
    kept: an object for each token would make Python's collector look at the whole heap."""

    answer: AnswerText
    framed: bool = False
    listed: bool = False
    parts: list[Part] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    tokens: int = 0
    logits: list[Floats] = field(default_factory=list)
    experts: ExpertChoices = field(default_factory=ExpertChoices)

    def take(self, piece: AnswerPiece) -> None:
        """Add a piece of the answer."""
        self.parts += piece.parts
        if piece.token is not None:
            self.tokens += len(piece.events)
            if self.listed:
                self.events += piece.events

    def keep(self, first: int, rows: Floats) -> None:
        """Store logits. Called on the engine's thread, which reuses ``rows``."""
        self.logits.extend(rows.copy())

    def _experts_used(self) -> Ints:
        answer = self.answer
        return self.experts.of(len(answer.request.prompt) + len(answer.sampled) - 1)

    def message(self) -> dict[str, Any] | None:
        """The answer as a message; None for a completion."""
        if self.answer.parser is None:
            return None
        from harness.serve.answers import message_of

        return message_of(self.parts)

    def completion(
        self, index: int, parameters: SamplingParams, tokenizer: Tokenizer
    ) -> Completion:
        """The finished continuation, number ``index`` of its prompt."""
        answer, events = self.answer, self.events
        assert answer.finish is not None
        listed = _listed(events, parameters.listed)
        ending = answer.sampled[len(answer.tokens) :][:1]
        stopped = answer.stop_string is None and set(ending) & set(parameters.stop_token_ids)
        return Completion(
            text=content_of(self.parts) if self.framed else answer.text,
            tokens=tuple(answer.tokens),
            finish_reason=answer.finish,
            stop_string=answer.stop_string,
            log_probabilities=listed[0],
            top_tokens=listed[1],
            top_log_probabilities=listed[2],
            logits=np.array(self.logits[: self.tokens]) if parameters.logits else None,
            experts=self._experts_used() if parameters.experts else None,
            message=self.message(),
            index=index,
            stop_token=ending[0] if stopped else None,
            token_texts=_texts(events, tokenizer) if parameters.listed is not None else None,
        )


def _texts(events: Sequence[TokenEvent], tokenizer: Tokenizer) -> dict[int, str]:
    """The text of every token that has a log-probability."""
    tokens = {event.token for event in events}
    tokens |= {token for event in events for token, _ in event.top}
    return {token: text_of_tokens(tokenizer, [token]) for token in sorted(tokens)}


def text_of_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of token ids, including control tokens and incomplete characters."""
    return tokenizer.decode_bytes(tokens, special=True).decode(errors="replace")


def _listed(
    events: Sequence[TokenEvent], listed: int | None
) -> tuple[Floats | None, Ints | None, Floats | None]:
    """Log-probabilities of the events' tokens, and the ``listed`` likeliest tokens with theirs;
    None if not requested."""
    if listed is None:
        return None, None, None
    shape = (len(events), listed)
    return (
        np.array([event.log_probability for event in events], np.float32),
        np.array([token for event in events for token, _ in event.top], np.int32).reshape(shape),
        np.array([value for event in events for _, value in event.top], np.float32).reshape(shape),
    )


class Pending:
    """The requests of one prompt. It takes their events and is ``done`` after the last one."""

    def __init__(
        self,
        index: int,
        requests: Sequence[Request],
        parameters: SamplingParams,
        tokenizer: Tokenizer,
        plan: ChatPlan | None = None,
        masks: Mapping[int, TokenMasks] = NO_MASKS,
        prompt: str | None = None,
    ) -> None:
        """``plan`` has the parser of a chat's answers, ``masks`` the token masks by request.
        ``prompt`` is the prompt's text. Raises RequestError for unsupported stop strings."""
        self.index = index
        self.requests = requests
        self._parameters = parameters
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._masks = masks
        shown = frozenset() if plan is None else plan.form.dialect.shown
        framed = plan is not None and plan.form.dialect.framed
        self._choices = {
            request.id: _Choice(
                AnswerText(
                    tokenizer,
                    request,
                    parser=None if plan is None else plan.parser(request),
                    shown=shown,
                    stop_tokens=parameters.stop_token_ids,
                    masks=masks.get(request.id),
                ),
                framed,
                parameters.listed is not None,
            )
            for request in requests
        }
        self._left = len(requests)
        parsers = [choice.answer.parser for choice in self._choices.values()]
        calls = any(parser is not None and parser.expects_calls for parser in parsers)
        self.ends_early = calls or bool(parameters.stop or parameters.stop_token_ids)
        """Whether its text may end it: by a stop string, a token or a call."""

    @property
    def done(self) -> bool:
        """Whether all completions have ended."""
        return self._left == 0

    @property
    def submission(self) -> Submission:
        """The submission to the engine's driver."""
        sinks: dict[int, Callable[[int, Floats], None]] = {}
        if self._parameters.logits:
            sinks = {number: choice.keep for number, choice in self._choices.items()}
        experts = {}
        if self._parameters.experts:
            experts = {number: choice.experts for number, choice in self._choices.items()}
        return Submission(self.requests, sinks, masks=self._masks, experts=experts)

    def take(self, event: TokenEvent, stream: EventStream) -> Piece | None:
        """The new text of an event; None if there is none. Raises ZincError if the model fails."""
        choice = self._choices[event.request_id]
        try:
            piece = choice.answer.receive(event, stream)
        except GrammarBroke as broke:
            raise RequestError("response_format", str(broke)) from None
        if piece is None:
            return None
        choice.take(piece)
        self._left -= piece.finish is not None
        text = content_of(piece.parts) if choice.framed else piece.text
        return Piece(text, piece.token) if text or piece.token is not None else None

    def output(self, stream: EventStream) -> Output:
        """The result, after the last event."""
        first = self.requests[0]
        return Output(
            self.index,
            first.prompt,
            tuple(
                choice.completion(index, self._parameters, self._tokenizer)
                for index, choice in enumerate(self._choices.values())
            ),
            cached_tokens=stream.facts[first.id].cached,
            prompt=self._prompt,
        )

    def failed(self, error: ZincError) -> Output:
        """The result of a prompt that failed."""
        return Output(self.index, self.requests[0].prompt, error=error, prompt=self._prompt)
