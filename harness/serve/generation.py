"""Turns a request body into engine requests, and their events into pieces of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from contract.errors import RequestError
from contract.types import (
    MAX_INT32,
    MAX_UINT64,
    MIN_TOP_P,
    FinishReason,
    QosClass,
    Request,
    SamplingParams,
    Tenant,
    TokenEvent,
)
from harness.digest import RowDigests, RunningDigest
from harness.host.answer_text import AnswerText, Piece, joined_pieces
from harness.host.driver import EventStream
from harness.host.event_queue import Delivered
from harness.host.expert_choices import ExpertChoices
from harness.host.prompt_scores import PromptScores
from harness.host.structured.grammars import GrammarBroke
from harness.host.submissions import joined_sinks
from harness.host.watch import RequestFacts
from harness.leaves import leaves_of_rows
from harness.serve.answer_grammar import Constrained, grammar_error, masks_of
from harness.serve.chat import ChatPlan
from harness.serve.errors import ApiError
from harness.serve.model import ServedModel
from harness.serve.random_pool import random_bits
from harness.serve.wire import MOST_CHOICES, Sampled
from reference.runner import LOGITS

T = TypeVar("T")
DRAWN_SEED_BITS = 53
"""Bits of a drawn seed: as many as a client can hold whose numbers are binary64."""
TIER_OF_CLASS = {
    QosClass.INTERACTIVE: "priority",
    QosClass.STANDARD: "default",
    QosClass.BATCH: "flex",
}
"""OpenAI's names of the classes of service."""
CLASS_OF_TIER = {tier: qos for qos, tier in TIER_OF_CLASS.items()}
LIGHT_STOP_CHARACTERS = 128
"""Most characters of stop strings that the engine's thread may search for."""
COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of ``/v1/completions``."""


SendPieces = Callable[[Callable[[], Sequence[Piece]]], bool]
"""Passes on the pieces that the given function makes; False where they have to be taken instead."""


class Generation:
    """The choices of one HTTP request, which run in the engine from the construction on.

    ``plan`` says what the answers of a chat are made of, ``constrained`` what texts that are no
    chat are held to; one of ``stop_tokens`` ends an answer and is no part of its text. With
    ``leaves``, the form of a receipt's leaves, it has the ``step_digests`` of a receipt, which
    ``make_receipt`` makes once; with ``experts`` those of a mixture. Raises RequestError,
    QueueFull, EngineStopped and ApiError when it cannot begin. Iterate ``pieces``, and ``cancel``
    whatever happens."""

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
            # Who hashes whole rows, too, needs the rows.
            on_device = model.limits.digests and not digests
            self._rows[request.id], output = leaves_of_rows(leaves, on_device)
        self.slot = -1
        """The number of the client's slot in which it answers: see ``SlotTable``."""
        self.on_tokens: Callable[[int], None] = ignore_tokens
        """Called with the number of new tokens of the answers."""
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
        """How many prompt tokens came from the cache, and the first token by which the prompt
        differs from a cached one of the same tenant's, where there is one."""
        cached: dict[str, Any] = {"tokens": self.cached_tokens}
        from_disk = self._in_prompts(lambda facts: facts.from_disk)
        if from_disk:
            cached["from_disk"] = from_disk
        for choice in self.choices:
            found = self.facts_of(choice).difference
            # A preempted request and one of given tokens are looked up with tokens of the answer.
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
        """Tokens generated, those that ended a choice included."""
        return sum(len(choice.sampled) for choice in self.choices)

    @property
    def tokens(self) -> list[list[int]]:
        """For each choice its tokens, one that ended it included."""
        return [choice.sampled for choice in self.choices]

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def logits_digests(self) -> list[str | None] | None:
        """For each choice the digest of the logits its tokens were sampled from; None if not
        requested."""
        if not self._digests:
            return None
        return [self._digests[one.request.id].after(len(one.sampled)) for one in self.choices]

    @property
    def step_digests(self) -> list[list[str]]:
        """For each choice the digests of the logits its tokens were sampled from, row by row."""
        return [self._rows[one.request.id].first(len(one.sampled)) for one in self.choices]

    @property
    def experts(self) -> list[Any] | None:
        """For each choice the experts of every position, layer by layer; None if not requested."""
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
        """The id and digest of the receipt of this answer, which has ended; None where none is
        made. Raises StorageProblem where it cannot be stored."""
        if self._receipt is None and self.make_receipt is not None:
            self._receipt = self.make_receipt()
        return self._receipt

    @property
    def preemptions(self) -> int:
        """How often a choice lost its slot."""
        return sum(self.facts_of(choice).preempted for choice in self.choices)

    def facts_of(self, choice: AnswerText) -> RequestFacts:
        """The driver's record of a choice."""
        return self._events.facts[choice.request.id]

    def seconds_of(self, choice: AnswerText) -> tuple[float, float]:
        """Seconds from the admission of a choice to its first token, and from there to its latest
        one; 0 for tokens that there are none of."""
        facts = self.facts_of(choice)
        admitted = facts.submitted if facts.admitted is None else facts.admitted
        first = time.monotonic() if choice.first is None else choice.first
        latest = first if choice.latest is None else choice.latest
        return max(0.0, first - admitted), max(0.0, latest - first)

    def prompt_events(self, choice: int) -> Sequence[TokenEvent]:
        """The tokens of a choice's prompt, which are there once its first piece is: those from its
        ``score_from`` on have log-probabilities."""
        request = self.choices[choice].request
        scores = self._scores.get(request.id)
        return PromptScores(request).tokens if scores is None else scores.tokens

    def pieces(self, wait: float, send: SendPieces | None = None) -> Iterator[list[Piece]]:
        """The new pieces, until every choice has ended; an empty list after each ``wait``
        seconds in which nothing did. Raises ApiError when a choice fails.

        While this waits, ``send`` may send pieces on the engine's thread where they make little
        work; those are left out."""
        offer = None if send is None or not self._light else partial(self._send_at_once, send)
        while not self.done:
            taken = self._events.take(wait, offer)
            if not self.done:
                yield self._received(taken)

    def cancel(self) -> None:
        """Cancel the choices that have not ended."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = FinishReason.CANCELLED
                self._events.cancel(choice.request.id, len(choice.sampled))

    @property
    def _light(self) -> bool:
        """Whether the text of a token costs so little that the engine's thread may make it between
        two steps: no listed probabilities, no calls to parse, and no long stop strings."""
        return all(
            choice.request.log_probabilities is None
            and sum(map(len, choice.request.stop)) <= LIGHT_STOP_CHARACTERS
            and (choice.parser is None or not choice.parser.expects_calls)
            for choice in self.choices
        )

    def _send_at_once(self, send: SendPieces, events: Sequence[Delivered]) -> bool:
        """Send the pieces of events on the engine's thread; False where the reader has to."""
        if not send(lambda: self._received(events)):
            return False
        if self.done:
            self._events.wake()
        return True

    def _received(self, events: Sequence[Delivered]) -> list[Piece]:
        pieces = []
        try:
            for at, event in events:
                piece = self._by_id[event.request_id].receive(event, self._events, at)
                if piece is not None:
                    pieces.append(piece)
        except GrammarBroke as broke:
            assert self._constrained is not None
            raise grammar_error(self._constrained.grammar_param, str(broke)) from None
        finally:
            self.on_tokens(sum([len(piece.events) for piece in pieces]))
        return pieces if len(pieces) < 2 else joined_pieces(pieces)


def ignore_tokens(_: int) -> None:
    """Count no tokens."""


def requests_of(
    body: Sampled,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    tenant: Tenant,
    *,
    max_tokens: int | None,
    log_probabilities: int | None,
    most: int | None = None,
    scored: int | None = None,
    turns: tuple[int, ...] = (),
) -> list[Request]:
    """The engine requests of a body: ``n`` choices of each prompt, in which turns of a conversation
    begin at the positions ``turns``. Without ``max_tokens`` an answer may fill the context, or have
    ``most`` tokens. Where ``scored`` is not None the tokens of the prompts have log-probabilities,
    with so many likely ones listed. Raises ApiError and RequestError."""
    n = body.n or 1
    check_choices(len(prompts), n)
    forced = _forced_answer(body)
    max_tokens = len(forced) or max_tokens
    seed = random_bits(DRAWN_SEED_BITS) if body.seed is None else body.seed
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return [
        Request(
            id=model.driver.new_id(),
            prompt=tuple(prompt),
            max_tokens=(
                min(model.room(len(prompt), tenant), MAX_INT32 if most is None else most)
                if max_tokens is None
                else max_tokens
            ),
            sampling=sampling_of(body, model, seed + choice),
            stop=stop,
            tenant=tenant.id,
            ignore_end=body.ignore_eos,
            logit_bias=_biases(body.logit_bias or {}),
            log_probabilities=log_probabilities,
            qos=CLASS_OF_TIER.get(body.service_tier or "auto"),
            score_from=1 if scored is not None and len(prompt) > 1 else None,
            score_top=scored or 0,
            turns=turns,
            force_tokens=forced,
            adapters=model.scales or (),
            min_tokens=body.min_tokens,
            stop_tokens=tuple(body.stop_token_ids or ()),
        )
        for prompt in prompts
        for choice in range(n)
    ]


def _forced_answer(body: Sampled) -> tuple[int, ...]:
    """The tokens of an answer that the body gives, empty where it is sampled. Raises RequestError
    for fields that contradict it."""
    tokens = tuple(body.force_tokens or ())
    for name in ("max_tokens", "max_completion_tokens", "n_predict") if tokens else ():
        limit = getattr(body, name, None)
        if limit not in (None, -1, len(tokens)):
            raise RequestError(name, f"is {limit}, and force_tokens are {len(tokens)}")
    for name in ("n", "stop", "stop_token_ids") if tokens else ():
        if getattr(body, name) not in (None, 1, "", []):
            raise RequestError(name, "changes nothing where force_tokens are given; leave it out")
    return tokens


def check_choices(prompts: int, n: int = 1) -> None:
    """Raises ApiError for more choices than one request may have."""
    if n * prompts > MOST_CHOICES:
        param = "n" if n > 1 else "prompt"
        raise ApiError(400, f"n times the prompts is above {MOST_CHOICES}", param=param)


def sampling_of(body: Sampled, model: ServedModel, seed: int) -> SamplingParams:
    """The sampling parameters of a body, with the model's defaults for those it omits. Raises
    RequestError."""
    window, own = model.penalty_window, model.sampling
    penalty = _given(body.repeat_penalty, own.repeat_penalty)
    sampling = SamplingParams(
        temperature=float(_given(body.temperature, own.temperature)),
        top_k=max(0, _given(body.top_k, own.top_k)),
        top_p=max(MIN_TOP_P, float(_given(body.top_p, own.top_p))),
        min_p=float(_given(body.min_p, own.min_p)),
        repeat_penalty=float(_given(body.repetition_penalty, penalty)),
        repeat_last_n=_given(body.repeat_last_n, window),
        presence_penalty=float(_given(body.presence_penalty, 0.0)),
        frequency_penalty=float(_given(body.frequency_penalty, 0.0)),
        seed=seed % (MAX_UINT64 + 1),
    )
    model.check_window(sampling)
    return sampling


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, bias in biases.items():
        if not token.isdecimal() or not token.isascii() or len(token) > 10:
            raise RequestError("logit_bias", f"names {token[:32]!r}, which is no token id")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)
