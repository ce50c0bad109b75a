"""Makes the receipts of answers that have ended."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from contract.arithmetic import ARITHMETIC_VERSION
from contract.types import Request, SamplingParams, Tenant
from harness.file_digests import frequency_tables
from harness.serve.receipts.canonical import canonical_digest
from harness.serve.receipts.store import ReceiptStore, base_payload
from harness.serve.receipts.tree import tree_root
from harness.serve.wire import plain

if TYPE_CHECKING:
    from harness.serve.generation import Generation
    from harness.serve.model import ServedModel
    from reference.limits import Limits
    from reference.model.chat_template import ChatTemplate
    from reference.model.open import Model

Json = dict[str, Any]


def store_answer(
    store: ReceiptStore,
    generation: Generation,
    kind: str,
    body: msgspec.Struct,
    tenant: Tenant,
    name: str,
) -> dict[str, str]:
    """Make and store the receipt ``name`` of an answer. Returns its id and digest. Raises
    StorageProblem."""
    model = generation.model
    answers = [
        (choice.request, tokens, choice.finish or "", leaves)
        for choice, tokens, leaves in zip(
            generation.choices, generation.tokens, generation.step_digests, strict=True
        )
    ]
    facts = served_facts(model, tenant)
    payload = answer_payload(name, kind, facts, request_text(body), answers)
    return _noted(store.add(tenant.id, payload, [leaves for *_, leaves in answers]), name)


def answer_payload(
    name: str,
    kind: str,
    facts: Json,
    request: str,
    answers: Sequence[tuple[Request, Sequence[int], str, Sequence[str]]],
) -> Json:
    """What the receipt ``name`` of answers to ``request`` says. ``answers`` has of each choice the
    engine's request, the tokens, why it ended, and the leaves."""
    prompts = list(dict.fromkeys(request.prompt for request, *_ in answers))
    return {
        **base_payload(name, kind),
        **facts,
        "request": request,
        "prompts": [list(prompt) for prompt in prompts],
        "choices": [choice_facts(prompts.index(answer[0].prompt), *answer) for answer in answers],
        "results": [],
        "usage": usage_of(prompts, [tokens for _, tokens, *_ in answers]),
    }


def keep_results(
    store: ReceiptStore | None,
    model: ServedModel,
    kind: str,
    body: msgspec.Struct,
    tenant: Tenant,
    prompts: Sequence[Sequence[int]],
    results: Sequence[bytes],
) -> Json:
    """Make and store the receipt of results that are not tokens, such as vectors; ``results`` are
    the bytes of each. Returns ``{"receipt": {id, digest}}``, or nothing without a store. Raises
    StorageProblem."""
    if store is None:
        return {}
    name = f"{kind}-{secrets.token_hex(12)}"
    payload = base_payload(name, kind) | served_facts(model, tenant)
    payload |= {
        "request": request_text(body),
        "prompts": [list(prompt) for prompt in prompts],
        "choices": [],
        "results": [hashlib.sha256(result).hexdigest() for result in results],
        "usage": {name: sum(map(len, prompts)) for name in ("prompt_tokens", "total_tokens")},
    }
    return {"receipt": _noted(store.add(tenant.id, payload, []), name)}


def served_facts(model: ServedModel, tenant: Tenant) -> Json:
    """A receipt's facts about the model that answered and the tenant."""
    adapters = model.adapters.facts(model.scales or ())
    facts = model_facts(model.name, model.model, model.limits, model.files, adapters)
    return facts | user_facts(tenant, model.template, model.left_out(tenant))


def user_facts(tenant: Tenant, template: ChatTemplate | None, left_out: Json) -> Json:
    """A receipt's facts about the tenant, the template, and the values of sampling parameters that
    a request leaves out."""
    return {
        "tenant": {"id": tenant.id, "name": tenant.name},
        "template": template_digest(None if template is None else template.text),
        "sampling_defaults": left_out,
    }


def model_facts(
    name: str, model: Model, limits: Limits, files: Sequence[str], adapters: Sequence[Json]
) -> Json:
    """A receipt's facts about the function that a model computes: files, adapters, arithmetic."""
    config = model.config
    tables = frequency_tables(model, limits.context)
    types = {tensor.ggml_type.name for tensor in model.file.tensors.values()}
    facts = {
        "name": name,
        "architecture": config.architecture,
        "layers": config.layers,
        "hidden": config.hidden,
        "vocab": config.vocab,
        "types": sorted(types),
        "kv_dtype": limits.kv_dtype.name,
        "files": list(files),
        **({"adapters": list(adapters)} if adapters else {}),
        **({"rope_factors": tables} if tables else {}),
    }
    return {"arithmetic": ARITHMETIC_VERSION, "model": facts}


def template_digest(text: str | None) -> str | None:
    """SHA-256 of a chat template, hex."""
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def choice_facts(
    prompt: int, request: Request, tokens: Sequence[int], finish: str, leaves: Sequence[str]
) -> Json:
    """A receipt's facts about one choice."""
    return {
        "prompt": prompt,
        "sampling": sampling_facts(request.sampling),
        "seed": str(request.sampling.seed),
        "max_tokens": request.max_tokens,
        "tokens": list(tokens),
        "finish": finish,
        "root": tree_root([bytes.fromhex(leaf) for leaf in leaves]).hex(),
    }


def sampling_facts(sampling: SamplingParams) -> dict[str, float]:
    """Sampling parameters, apart from the seed."""
    return {name: value for name, value in asdict(sampling).items() if name != "seed"}


def usage_of(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, int]:
    """The token counts of a receipt: distinct prompts, and all answers."""
    prompt, completion = sum(map(len, prompts)), sum(map(len, answers))
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return counts | {"total_tokens": prompt + completion}


def request_text(body: msgspec.Struct) -> str:
    """A request as JSON text, without its null fields."""
    values = plain(body)
    return json.dumps({name: value for name, value in values.items() if value is not None})


def _noted(document: Json, name: str) -> dict[str, str]:
    return {"id": name, "sha256": canonical_digest(document["payload"])}
