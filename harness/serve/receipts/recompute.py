"""Recomputes the steps of a receipt, all or a sample, and names the first that differs."""

from __future__ import annotations

import base64
import hashlib
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TypeVar

from msgspec import Struct

from contract.errors import ZincError
from contract.types import LOCAL_TENANT, FinishReason, TokenEvent
from harness.host.answer_text import NO_TOKENS, TOOL_CALLS, AnswerText
from harness.host.event_queue import TimedEvent
from harness.host.submissions import Submission
from harness.leaves import leaves_of_rows
from harness.serve.answer_grammar import masks_of
from harness.serve.caller import Caller
from harness.serve.embeddings import EmbeddingRequest, embed, texts_of
from harness.serve.errors import ApiError
from harness.serve.generation import Generation
from harness.serve.receipts.canonical import canonical
from harness.serve.receipts.check import DerivedRequests, payload_bytes
from harness.serve.receipts.document import ChoiceFacts, Receipt
from harness.serve.rerank import RerankRequest, prompts_to_rank, rerank
from harness.serve.scores import ScoreRequest, score, texts_to_score
from harness.serve.service import FailedWhileRunning, Service
from harness.serve.strict_json import BadJson, loads
from harness.serve.wire import decode

Body = TypeVar("Body", bound=Struct)
WAIT_SECONDS = 1.0
OTHER_BITS = "the logits are not those of the receipt"


@dataclass(frozen=True, slots=True)
class Recomputed:
    """How many of the ``steps`` were recomputed, and the first difference, None if there is
    none."""

    checked: int
    steps: int
    problem: str | None

    def seen(self, wrong: int) -> float:
        """The probability that this sample contains at least one of ``wrong`` wrong steps."""
        wrong = min(wrong, self.steps)
        return 1.0 - comb(self.steps - wrong, self.checked) / comb(self.steps, self.checked)


def recompute_all(receipt: Receipt, derived: DerivedRequests) -> Recomputed:
    """Answer the request again and compare every step."""
    choices = receipt.payload.choices
    steps = sum(len(choice.tokens) for choice in choices)
    try:
        generation = Generation(
            derived.served,
            derived.requests,
            plan=derived.plan,
            constrained=derived.constrained,
            stop_tokens=derived.stop_tokens,
            leaves=receipt.payload.receipt,
        )
    except (ZincError, ApiError) as error:
        return Recomputed(steps, steps, f"request: this model refuses it: {error}")
    try:
        for events in generation.taken(WAIT_SECONDS):
            generation.received(events)
    finally:
        generation.cancel()
    for number, choice in enumerate(choices):
        problem = _difference(
            choice,
            receipt.leaves[number],
            generation.tokens[number],
            generation.step_digests[number],
            generation.choices[number].finish,
        )
        if problem is not None:
            return Recomputed(steps, steps, problem.format(where=f"choice {number}"))
    return Recomputed(steps, steps, None)


def _difference(
    claimed: ChoiceFacts,
    leaves: Sequence[str],
    tokens: Sequence[int],
    digests: Sequence[str],
    finish: str | None,
) -> str | None:
    """The first difference between a choice and what was computed, as text with ``{where}`` to fill
    in."""
    for step, (token, digest) in enumerate(zip(tokens, digests, strict=True)):
        if step >= len(claimed.tokens):
            break
        if leaves[step] != digest:
            return f"bits: {{where}}: step {step}: {OTHER_BITS}"
        if claimed.tokens[step] != token:
            return f"tokens: {{where}}: step {step}: {claimed.tokens[step]}, sampling gives {token}"
    if len(claimed.tokens) != len(tokens):
        count = len(claimed.tokens)
        return f"tokens: {{where}}: {count} of them, the whole answer has {len(tokens)}"
    if claimed.finish != finish:
        return f"finish: {{where}}: {claimed.finish!r}, here {finish!r}"
    return None


def recompute_sample(receipt: Receipt, derived: DerivedRequests, count: int) -> Recomputed:
    """Recompute ``count`` random steps. Each is one row after its prefix; prefixes are cached."""
    choices = receipt.payload.choices
    all_steps = [
        (n, step) for n, choice in enumerate(choices) for step in range(len(choice.tokens))
    ]
    chosen = secrets.SystemRandom().sample(all_steps, min(count, len(all_steps)))
    for number, step in sorted(chosen):
        found = _step_problem(receipt, derived, number, step)
        if found is not None:
            problem = f"{found[0]}: choice {number}: step {step}: {found[1]}"
            return Recomputed(len(chosen), len(all_steps), problem)
    for number, choice in enumerate(choices):
        if not _may_end(derived, number, choice):
            problem = f"finish: choice {number}: nothing in the tokens ends it: {choice.finish!r}"
            return Recomputed(len(chosen), len(all_steps), problem)
    return Recomputed(len(chosen), len(all_steps), None)


def _step_problem(
    receipt: Receipt, derived: DerivedRequests, number: int, step: int
) -> tuple[str, str] | None:
    choice, request = receipt.payload.choices[number], derived.requests[number]
    driver = derived.served.driver
    before = tuple(choice.tokens[:step])
    least = max(0, request.min_tokens - step)
    one = replace(
        request,
        id=driver.new_id(),
        prompt=(*request.prompt, *before),
        max_tokens=1,
        force_tokens=request.force_tokens[step : step + 1],
        stop=(),
        ignore_end=request.ignore_end or not least,
        min_tokens=min(1, least),
        log_probabilities=None,
        score_from=None,
    )
    masks = {}
    if derived.constrained.grammar is not None:
        unbound = replace(one, ignore_end=False)
        masks = masks_of(derived.constrained, derived.served.grammars, [unbound])
        masks[one.id].before = before
    digests, output = leaves_of_rows(receipt.payload.receipt, derived.served.limits.digests)
    stream = driver.open_stream()
    try:
        submission = Submission([one], {one.id: digests}, len(one.prompt) - 1, output, masks)
        (refused,) = driver.submit_to(stream, [submission])
        if refused is not None:
            return "request", str(refused)
        taken: list[TimedEvent] = []
        while not taken:
            taken = stream.take(WAIT_SECONDS)
    finally:
        stream.cancel()
    if digests.first(1) != [receipt.leaves[number][step]]:
        return "bits", OTHER_BITS
    token = taken[0].event.token
    if token != choice.tokens[step]:
        return "tokens", f"{choice.tokens[step]}, sampling gives {token}"
    return None


def _may_end(derived: DerivedRequests, number: int, choice: ChoiceFacts) -> bool:
    """Whether the choice may end with its last token for the reason it names, as far as known
    without recomputing it."""
    request = derived.requests[number]
    tokenizer = derived.served.tokenizer
    ends = set() if request.ignore_end else set(tokenizer.eog_ids)
    last = choice.tokens[-1] if choice.tokens else None
    if choice.finish == FinishReason.LENGTH.value:
        return len(choice.tokens) == request.max_tokens
    stopped = last in ends or last in derived.stop_tokens
    if choice.finish == TOOL_CALLS and derived.plan is not None and derived.plan.form.functions:
        return True
    if choice.finish != FinishReason.STOP.value:
        return False
    shown = NO_TOKENS if derived.plan is None else derived.plan.form.dialect.shown
    answer = AnswerText(tokenizer, request, shown=shown)
    for position, token in enumerate(choice.tokens, len(request.prompt)):
        answer.take(TokenEvent(request.id, token, position))
    answer.take(TokenEvent(request.id, -1, 0, FinishReason.LENGTH))
    return stopped or answer.stop_string is not None


def recompute_results(receipt: Receipt, service: Service, count: int | None) -> Recomputed:
    """Recompute the vectors or scores of a receipt, and compare all or ``count`` of them."""
    payload = receipt.payload
    whole = len(payload.prompts)
    chosen = list(range(whole))
    if count is not None and count < whole:
        chosen = sorted(secrets.SystemRandom().sample(chosen, count))
    try:
        found = _results(receipt, service)
    except (ZincError, ApiError, FailedWhileRunning) as error:
        reason = error.error if isinstance(error, FailedWhileRunning) else error
        return Recomputed(len(chosen), whole, f"request: this model refuses it: {reason}")
    for number in chosen:
        if hashlib.sha256(found[number]).hexdigest() != payload.results[number]:
            problem = f"bits: result {number}: it is not that of the receipt"
            return Recomputed(len(chosen), whole, problem)
    return Recomputed(len(chosen), whole, None)


def _results(receipt: Receipt, service: Service) -> list[bytes]:
    if receipt.payload.kind == "score":
        scored = score(service, _reading(receipt, ScoreRequest), LOCAL_TENANT, Caller())
        return [canonical(entry) for entry in scored["data"]]
    if receipt.payload.kind == "rerank":
        ranked = _reading(receipt, RerankRequest)
        ranked.top_n, ranked.return_documents = None, False
        answer = rerank(service, ranked, LOCAL_TENANT, Caller())
        by_index = sorted(answer["results"], key=lambda one: int(one["index"]))
        return [struct.pack("<d", one["relevance_score"]) for one in by_index]
    body = _reading(receipt, EmbeddingRequest)
    body.encoding_format = "base64"
    embedded = embed(service, body, LOCAL_TENANT, Caller())
    return [base64.b64decode(entry["embedding"]) for entry in embedded["data"]]


def _reading(receipt: Receipt, kind: type[Body]) -> Body:
    """The request in a receipt. Raises ApiError."""
    try:
        fields = loads(receipt.payload.request.encode())
    except BadJson as error:
        raise ApiError(400, str(error)) from None
    if not isinstance(fields, dict):
        raise ApiError(400, "it is no JSON object")
    return decode(payload_bytes({**fields, "model": None}), kind, [])


def reading_problems(service: Service, receipt: Receipt) -> Iterator[str]:
    """The differences between the prompts of a receipt of vectors or scores and those of its
    request."""
    prompts: Sequence[Sequence[int]]
    try:
        if receipt.payload.kind == "score":
            prompts = texts_to_score(service, _reading(receipt, ScoreRequest), LOCAL_TENANT)
        elif receipt.payload.kind == "rerank":
            prompts = prompts_to_rank(service.model, _reading(receipt, RerankRequest))
        else:
            prompts = texts_of(service, _reading(receipt, EmbeddingRequest), LOCAL_TENANT)
    except (ZincError, ApiError) as error:
        yield f"request: this model refuses it: {error}"
        return
    if list(map(list, prompts)) != receipt.payload.prompts:
        yield "prompt: the request's texts give other tokens"
    if len(receipt.payload.results) != len(receipt.payload.prompts):
        yield f"results: {len(receipt.payload.results)} of {len(receipt.payload.prompts)} prompts"
