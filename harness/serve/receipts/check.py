"""Checks a receipt without computing: its signature and counts, the model, and the request's
parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from msgspec.structs import asdict

from contract.arithmetic import ARITHMETIC_VERSION
from contract.errors import ZincError
from contract.types import LOCAL_TENANT, Request
from harness.file_digests import frequency_tables
from harness.sampling_defaults import sampling_defaults
from harness.serve.answer_grammar import Constrained, TextPlan
from harness.serve.chat import ChatPlan
from harness.serve.errors import ApiError
from harness.serve.model import CONTEXT, WINDOW, ServedModel
from harness.serve.other_formats import own_chat_fields
from harness.serve.receipts.document import ChoiceFacts, Receipt
from harness.serve.receipts.make import sampling_facts, template_digest, usage_of
from harness.serve.receipts.tree import tree_root
from harness.serve.service import Service, max_chat_tokens, max_completion_tokens
from harness.serve.strict_json import BadJson, loads
from harness.serve.wire import NO_SEEDS, ChatRequest, CompletionRequest, decode

READINGS = ("embedding", "score", "rerank")
"""The kinds of receipts of texts that are read and not continued."""


@dataclass(frozen=True)
class DerivedRequests:
    """The engine requests derived from a receipt's request, one for each choice, with the plan of a
    conversation, the grammar and the stop tokens. ``served`` is the model with the sampling
    defaults of the server that answered."""

    served: ServedModel
    requests: Sequence[Request]
    plan: ChatPlan | None
    constrained: Constrained
    stop_tokens: Sequence[int]
    context: int | None

    @property
    def within_context(self) -> DerivedRequests:
        """With requests that end where the context of the server that answered does."""
        if self.context is None:
            return self
        room = [max(1, self.context - len(request.prompt)) for request in self.requests]
        cut = [
            replace(r, max_tokens=min(r.max_tokens, n), min_tokens=min(r.min_tokens, n))
            for r, n in zip(self.requests, room, strict=True)
        ]
        return replace(self, requests=cut)


def record_problems(
    receipt: Receipt, trusted: Sequence[str] | None, tenant: str | None
) -> list[str]:
    """The errors in a receipt itself: signature, key, tenant, roots, counts."""
    payload, problems = receipt.payload, []
    if not receipt.is_signed:
        problems.append("signature: it is not of this receipt, which was changed or not signed")
    if trusted is not None and receipt.signature.key not in trusted:
        problems.append(f"key: {receipt.signature.key[:16]} is none of the keys that are trusted")
    if tenant is not None and tenant not in (payload.tenant.name, str(payload.tenant.id)):
        problems.append(f"tenant: the receipt is {payload.tenant.name!r}'s, not {tenant!r}'s")
    if payload.arithmetic != ARITHMETIC_VERSION:
        problems.append(
            f"version: the arithmetic is version {payload.arithmetic}, here {ARITHMETIC_VERSION}"
        )
    if len(receipt.leaves) != len(payload.choices):
        problems.append("steps: there are not as many lists of digests as choices")
    for number, (choice, leaves) in enumerate(zip(payload.choices, receipt.leaves, strict=False)):
        if len(leaves) != len(choice.tokens):
            problems.append(
                f"steps: choice {number}: {len(leaves)} digests for {len(choice.tokens)} tokens"
            )
        if tree_root([bytes.fromhex(leaf) for leaf in leaves]).hex() != choice.root:
            problems.append(f"steps: choice {number}: the root is not that of the digests")
        if not 0 <= choice.prompt < len(payload.prompts):
            problems.append(f"prompt: choice {number}: there is no prompt {choice.prompt}")
    reads = payload.kind in READINGS
    if payload.choices if reads else payload.results:
        what = "choices" if reads else "results"
        problems.append(f"{what}: a receipt of kind {payload.kind} has none")
    if payload.number < 1:
        problems.append(f"chain: the first receipt is number 1, this is {payload.number}")
    return problems + list(_usage_problems(receipt))


def _usage_problems(receipt: Receipt) -> Iterator[str]:
    payload = receipt.payload
    counted = usage_of(payload.prompts, [choice.tokens for choice in payload.choices])
    if payload.kind in READINGS:
        del counted["completion_tokens"]
    for name in sorted(counted.keys() | payload.usage.keys()):
        if counted.get(name) != payload.usage.get(name):
            claimed = payload.usage.get(name, "missing")
            yield f"usage: {name} is {claimed}, the receipt's tokens are {counted.get(name)}"


def chain_problems(receipts: Sequence[Receipt]) -> list[str]:
    """The errors in the order of receipts of one tenant's chain."""
    problems: list[str] = []
    for before, after in pairwise(receipts):
        first, second = before.payload, after.payload
        where = f"receipt {second.number} ({second.id})"
        if second.tenant != first.tenant:
            problems.append(
                f"tenant: {where} is {second.tenant.name!r}'s, not {first.tenant.name!r}'s"
            )
        if second.number != first.number + 1:
            problems.append(f"chain: receipt {first.number} is followed by {second.number}")
        if second.previous != before.digest:
            problems.append(f"chain: {where} names another receipt before it")
    if receipts and receipts[0].payload.number == 1 and receipts[0].payload.previous is not None:
        problems.append("chain: receipt 1 names one before it")
    return problems


def model_problems(receipt: Receipt, model: ServedModel) -> list[str]:
    """The differences between this model and the one that answered."""
    facts, config = receipt.payload.model, model.model.config
    said = facts.architecture, facts.layers, facts.hidden, facts.vocab
    shape = config.architecture, config.layers, config.hidden, config.vocab
    types = sorted({tensor.ggml_type.name for tensor in model.model.file.tensors.values()})
    others, problems = facts.files != list(model.files), list[str]()
    if said != shape:
        how = f"another model: {facts.architecture} of {facts.layers} layers answered"
    elif types != facts.types:
        how = f"another quantization: {' '.join(facts.types)} answered, this is {' '.join(types)}"
    else:
        how = "other weights of the same shape and formats"
    if others or said != shape or types != facts.types:
        answered = facts.files[0][:16] if facts.files else "no file"
        files = f"SHA-256 {answered} answered, this is {model.files[0][:16]}"
        problems.append(f"model: {how}; {files if others else 'but the files are these'}")
    if facts.kv_dtype != model.limits.kv_dtype.name:
        problems.append(
            f"kv_dtype: {facts.kv_dtype} answered, this is {model.limits.kv_dtype.name}"
        )
    tables = frequency_tables(model.model, model.limits.context)
    if facts.rope_factors and facts.rope_factors != tables:
        problems.append(
            f"context: {' '.join(facts.rope_factors)} answered, which the length of the context "
            f"chooses; of --context {model.limits.context} it is {' '.join(tables)}"
        )
    try:
        model.adapters.found(list(map(asdict, facts.adapters)))
    except KeyError as missing:
        problems.append(
            f"adapter: {missing.args[0][:16]} answered and is not open; name it with --lora"
        )
    template = None if model.template is None else template_digest(model.template.text)
    if receipt.payload.template != template:
        problems.append("template: the chat template that answered is not this file's")
    return problems


def derive_requests(receipt: Receipt, service: Service) -> DerivedRequests | str:
    """The engine requests of a receipt's request, or the reason why they cannot be derived."""
    payload = receipt.payload
    try:
        fields = loads(payload.request.encode())
        if not isinstance(fields, dict):
            return "request: it is no JSON object"
        for name in ("model", "lora"):
            fields.pop(name, None)
        drawn = fields.get("seed") in NO_SEEDS and bool(payload.choices)
        given = dict(payload.sampling_defaults)
        window, context = int(given.pop(WINDOW, 0)), given.pop(CONTEXT, None)
        if fields.get(WINDOW) is None:
            fields[WINDOW] = window
        raw = payload_bytes(fields)
        defaults = sampling_defaults({}, given={n: _int_if_whole(x) for n, x in given.items()})
        served = replace(service.model, sampling=defaults)
        deriving = replace(service, model=served)
        plan, limit = None, None
        constrained: Constrained
        if payload.kind == "chat":
            body = decode(raw, ChatRequest, [], own_chat_fields)
            body.seed = int(payload.choices[0].seed) if drawn else body.seed
            plan, requests = deriving.chat_requests(body, LOCAL_TENANT)
            constrained = plan
            limit, stop = max_chat_tokens(body), body.stop_token_ids
        else:
            text = decode(raw, CompletionRequest, [], own_chat_fields)
            text.seed = int(payload.choices[0].seed) if drawn else text.seed
            _, requests = deriving.completion_requests(text, LOCAL_TENANT)
            constrained = TextPlan.of(text)
            limit, stop = max_completion_tokens(text), text.stop_token_ids
    except (BadJson, ZincError, ApiError, ValueError) as error:
        return f"request: this model refuses it: {error}"
    if len(requests) != len(payload.choices):
        return (
            f"request: it asks for {len(requests)} choices, the receipt has {len(payload.choices)}"
        )
    if limit is None and not any(request.force_tokens for request in requests):
        # The limit may come from the context of the server that answered, so it is accepted.
        limits = [choice.max_tokens for choice in payload.choices]
        requests = [replace(r, max_tokens=n) for r, n in zip(requests, limits, strict=True)]
    reach = None if context is None else int(context)
    return DerivedRequests(served, requests, plan, constrained, stop or (), reach)


def _int_if_whole(value: float) -> float:
    """A number as an int if it is one. JSON does not distinguish 1 and 1.0."""
    return int(value) if value == int(value) else value


def payload_bytes(value: Mapping[str, object]) -> bytes:
    """The JSON body of a request."""
    return json.dumps(value).encode()


def request_problems(receipt: Receipt, derived: DerivedRequests) -> list[str]:
    """The differences between a receipt's prompts and parameters and those derived from its
    request."""
    problems = []
    for number, (choice, request) in enumerate(
        zip(receipt.payload.choices, derived.requests, strict=True)
    ):
        where = f"choice {number}"
        prompt = receipt.payload.prompts[choice.prompt]
        if prompt != list(request.prompt):
            problems.append(f"prompt: {where}: {_first_difference(request.prompt, prompt)}")
        problems += [f"parameters: {where}: {one}" for one in _parameters(choice, request)]
    return problems


def _first_difference(derived: Sequence[int], claimed: Sequence[int]) -> str:
    pairs = zip(derived, claimed, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(derived), len(claimed)))
    return (
        f"the request and the template give {len(derived)} tokens, the receipt has {len(claimed)}; "
        f"they differ from token {at} on"
    )


def _parameters(choice: ChoiceFacts, request: Request) -> Iterator[str]:
    derived = {**sampling_facts(request.sampling), "max_tokens": request.max_tokens}
    claimed = {**choice.sampling, "max_tokens": choice.max_tokens}
    for name in sorted(derived.keys() | claimed.keys()):
        if derived.get(name) != claimed.get(name):
            yield f"{name} is {claimed.get(name)}, the request's is {derived.get(name)}"
    if choice.seed != str(request.sampling.seed):
        yield f"seed is {choice.seed}, the request's is {request.sampling.seed}"
