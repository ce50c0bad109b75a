"""The running choices of one HTTP request: the engine's token events as pieces of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from contract.types import FinishReason, Request, TokenEvent
from harness.digest import RowDigests, RunningDigest
from harness.host.answer_text import AnswerText, Piece, joined_pieces
from harness.host.collectors import ExpertChoices, PromptScores
from harness.host.event_queue import TimedEvent
from harness.host.stream_driver import EventStream
from harness.host.structured.grammars import GrammarBroke
from harness.host.submissions import joined_sinks
from harness.host.watch import RequestFacts
from harness.leaves import leaves_of_rows
from harness.serve.answer_grammar import Constrained, grammar_error, masks_of
from harness.serve.chat import ChatPlan
from harness.serve.model import ServedModel
from reference.runner import LOGITS

LIGHT_STOP_CHARACTERS = 128
"""Most characters of stop strings for which the engine's thread itself makes the text of tokens."""
SendEvents = Callable[[Sequence[TimedEvent]], bool]
"""Sends the pieces that ``Generation.received`` makes of events. Returns False, and makes none, if
the reader has to send them itself."""


class Generation:
    """The choices of one HTTP request. The constructor submits them to the engine.

    ``plan`` has the parser and grammar of a chat's answers; ``constrained`` has the grammar of a
    completion. A token of ``stop_tokens`` ends an answer and is not part of its text. ``digests``
    records a digest of all logits of a choice, ``leaves`` (a version of the leaves of receipts; 0
    for none) one of each row, ``experts`` the experts chosen at each position. Raises RequestError,
    QueueFull, EngineStopped and ApiError if a choice cannot be submitted. The caller iterates
    ``pieces`` and always calls ``cancel`` in the end."""

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[Request],
        digests: bool = False,
        plan: ChatPlan | None = None,
        constrained: Constrained | None = None,
        stop_tokens: Collection[int] = (),
        leaves: int = 0,
        experts: bool = False,
    ) -> None:
        self.began = time.monotonic()
        self.model = model
        self._constrained = constrained = plan if constrained is None else constrained
        self._masks = {} if constrained is None else masks_of(constrained, model.grammars, requests)
        shown = frozenset() if plan is None else plan.form.dialect.shown
        self.tools_described = plan is not None and plan.tools_described
        self.choices = [
            AnswerText(
                model.tokenizer,
                request,
                index,
                parser=None if plan is None else plan.parser(request),
                shown=shown,
                stop_tokens=frozenset(stop_tokens),
                masks=self._masks.get(request.id),
            )
            for index, request in enumerate(requests)
        ]
        self._by_id = {choice.request.id: choice for choice in self.choices}
        self._digests = {request.id: RunningDigest() for request in requests if digests}
        self._rows: dict[int, RowDigests] = {}
        output = LOGITS
        for request in requests if leaves else ():
            # ``digests`` need the whole rows on the host.
            on_device = model.limits.digests and not digests
            self._rows[request.id], output = leaves_of_rows(leaves, on_device)
        self.slot = -1
        """The llama.cpp slot that answers, an index into ``SlotTable``; -1 for none."""
        self.on_tokens: Callable[[int], None] = lambda _: None
        """Called with the number of new tokens whenever events are received."""
        self.make_receipt: Callable[[], dict[str, str]] | None = None
        self._receipt: dict[str, str] | None = None
        self._scores = {
            request.id: PromptScores(request) for request in requests if request.score_from
        }
        self._experts = {request.id: ExpertChoices() for request in requests if experts}
        rows = joined_sinks(self._digests, self._rows)
        self._events: EventStream = model.driver.submit(
            requests, rows, self._masks, self._scores, output, self._experts
        )

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        for choice in self.choices:  # noqa: SIM110
            if choice.finish_reason is None:
                return False
        return True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; one that several choices share counts once."""
        prompts = {choice.request.prompt for choice in self.choices}
        return sum(map(len, prompts))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return self._in_prompts(lambda facts: facts.cached)

    def _in_prompts(self, count: Callable[[RequestFacts], int]) -> int:
        """The sum of a count over the prompts; one that several choices share counts once."""
        first: dict[tuple[int, ...], int] = {}
        for choice in self.choices:
            first.setdefault(choice.request.prompt, count(self.facts_of(choice)))
        return sum(first.values())

    @property
    def cached(self) -> dict[str, Any]:
        """JSON object: ``tokens``, prompt tokens from the prefix cache; ``from_disk``, how many of
        them were read from disk; ``first_difference``, the first token at which a prompt differs
        from a cached one of the tenant. The last two are left out if there is nothing to say."""
        cached: dict[str, Any] = {"tokens": self.cached_tokens}
        from_disk = self._in_prompts(lambda facts: facts.from_disk)
        if from_disk:
            cached["from_disk"] = from_disk
        for choice in self.choices:
            found = self.facts_of(choice).difference
            # The cache lookup of a preempted or forced request includes tokens of the answer.
            if found is not None and found.position < len(choice.request.prompt):
                text = self.model.tokenizer.token_text
                cached["first_difference"] = {
                    "position": found.position,
                    "cached": text(found.cached),
                    "new": text(choice.request.prompt[found.position]),
                }
                return cached
        return cached

    @property
    def completion_tokens(self) -> int:
        """Generated tokens, including those that ended a choice."""
        return sum(len(choice.sampled) for choice in self.choices)

    @property
    def tokens(self) -> list[list[int]]:
        """The generated token ids of each choice, including one that ended it."""
        return [choice.sampled for choice in self.choices]

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def logits_digests(self) -> list[str | None] | None:
        """For each choice the digest of the logits of its tokens; None if not requested."""
        if not self._digests:
            return None
        return [self._digests[one.request.id].after(len(one.sampled)) for one in self.choices]

    @property
    def step_digests(self) -> list[list[str]]:
        """For each choice and token the digest of the logits it was sampled from."""
        return [self._rows[one.request.id].first(len(one.sampled)) for one in self.choices]

    @property
    def experts(self) -> list[Any] | None:
        """For each choice the expert ids ``[position][layer][k]``; None if not requested."""
        if not self._experts:
            return None
        return [
            self._experts[one.request.id]
            .of(len(one.request.prompt) + len(one.sampled) - 1)
            .tolist()
            for one in self.choices
        ]

    @property
    def receipt(self) -> dict[str, str] | None:
        """Id and digest of the receipt, made at the first call after the last token; None if no
        receipt was requested. Raises StorageProblem if it cannot be stored."""
        if self._receipt is None and self.make_receipt is not None:
            self._receipt = self.make_receipt()
        return self._receipt

    @property
    def preemptions(self) -> int:
        """How often the engine preempted the choices, in all."""
        return sum(self.facts_of(choice).preempted for choice in self.choices)

    def facts_of(self, choice: AnswerText) -> RequestFacts:
        """The driver's times and counts of a choice."""
        return self._events.facts[choice.request.id]

    def seconds_of(self, choice: AnswerText) -> tuple[float, float]:
        """Seconds of prefill, from admission to the first token, and of decoding, from the first to
        the latest token. Before the first token, prefill ends now and decoding is 0."""
        facts = self.facts_of(choice)
        admitted = facts.submitted if facts.admitted is None else facts.admitted
        first = time.monotonic() if choice.first is None else choice.first
        latest = first if choice.latest is None else choice.latest
        return max(0.0, first - admitted), max(0.0, latest - first)

    def prompt_events(self, choice: int) -> Sequence[TokenEvent]:
        """The tokens of a choice's prompt; from ``score_from`` on with log-probabilities. To be
        called after the choice's first piece."""
        request = self.choices[choice].request
        scores = self._scores.get(request.id)
        return PromptScores(request).tokens if scores is None else scores.tokens

    def taken(self, wait: float, send: SendEvents | None = None) -> Iterator[list[TimedEvent]]:
        """Yield lists of new events, which the caller gives to ``received``, until every choice has
        ended; an empty list after ``wait`` seconds without an event.

        If their text is cheap to make, ``send`` is called on the engine's thread while this
        generator waits. What it sends is not yielded."""
        offer = None if send is None or not self._light else partial(self._send_at_once, send)
        while not self.done:
            taken = self._events.take(wait, offer)
            if not self.done:
                yield taken

    def cancel(self) -> None:
        """Cancel the choices that have not ended."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = FinishReason.CANCELLED
                self._events.cancel(choice.request.id, len(choice.sampled))

    @property
    def _light(self) -> bool:
        """Whether the engine's thread may make the text of tokens between two steps, since it is
        cheap: no log-probabilities, no tool calls to parse, no long stop strings."""
        return all(
            choice.request.log_probabilities is None
            and sum(map(len, choice.request.stop)) <= LIGHT_STOP_CHARACTERS
            and (choice.parser is None or not choice.parser.expects_calls)
            for choice in self.choices
        )

    def _send_at_once(self, send: SendEvents, events: Sequence[TimedEvent]) -> bool:
        """Send the pieces of events on the engine's thread; False if the reader has to do it."""
        if not send(events):
            return False
        if self.done:
            self._events.wake()
        return True

    def received(self, events: Sequence[TimedEvent]) -> list[Piece]:
        """The pieces of new events. Raises ApiError if a choice fails."""
        pieces, tokens = [], 0
        try:
            for at, event in events:
                choice = self._by_id[event.request_id]
                piece = choice.take(event, at)
                if piece is None:
                    continue
                if piece.finish is not None and event.finish_reason is None:
                    self._events.end(event.request_id, len(choice.sampled))
                pieces.append(piece)
                tokens += len(piece.events)
        except GrammarBroke as broke:
            assert self._constrained is not None
            raise grammar_error(self._constrained.grammar_param, str(broke)) from None
        finally:
            if tokens:
                self.on_tokens(tokens)
        return pieces if len(pieces) < 2 else joined_pieces(pieces)
