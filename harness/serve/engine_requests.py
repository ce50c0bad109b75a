"""Engine requests made from the body of an HTTP request."""

from __future__ import annotations

from collections.abc import Sequence

from contract.errors import RequestError
from contract.types import (
    MAX_INT32,
    MAX_UINT64,
    MIN_TOP_P,
    QosClass,
    Request,
    SamplingParams,
    Tenant,
)
from harness.serve.errors import ApiError
from harness.serve.model import ServedModel
from harness.serve.random_pool import random_bits
from harness.serve.wire import MAX_CHOICES, NO_SEEDS, GenerationRequest

DRAWN_SEED_BITS = 53
"""Bits of a drawn seed: a JSON number that is a binary64 holds it exactly."""
TIER_OF_CLASS = {
    QosClass.INTERACTIVE: "priority",
    QosClass.STANDARD: "default",
    QosClass.BATCH: "flex",
}
"""OpenAI's names of the classes of service."""
CLASS_OF_TIER = {tier: qos for qos, tier in TIER_OF_CLASS.items()}
COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of ``/v1/completions``."""


def requests_of(
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    tenant: Tenant,
    *,
    max_tokens: int | None,
    log_probabilities: int | None,
    fallback: int | None = None,
    scored: int | None = None,
    turns: tuple[int, ...] = (),
) -> list[Request]:
    """The engine requests of a body: its ``n`` choices for each prompt of token ids.

    If ``max_tokens`` is None, an answer may fill the context, up to ``fallback`` tokens. With
    ``log_probabilities`` generated tokens, with ``scored`` prompt tokens have log-probabilities,
    and as many of the likeliest tokens beside each; None for none. ``turns`` are the positions at
    which turns of a conversation begin. Raises ApiError and RequestError."""
    n = body.n or 1
    check_choices(len(prompts), n)
    forced = _forced_answer(body)
    max_tokens = len(forced) or max_tokens
    seed = random_bits(DRAWN_SEED_BITS) if body.seed is None or body.seed in NO_SEEDS else body.seed
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return [
        Request(
            id=model.driver.new_id(),
            prompt=tuple(prompt),
            max_tokens=(
                min(model.room(len(prompt), tenant), MAX_INT32 if fallback is None else fallback)
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


def _forced_answer(body: GenerationRequest) -> tuple[int, ...]:
    """The body's ``force_tokens``; empty if the answer is sampled. Raises RequestError for fields
    that contradict them."""
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
    """Raises ApiError for more than ``MAX_CHOICES`` choices in all."""
    if n * prompts > MAX_CHOICES:
        param = "n" if n > 1 else "prompt"
        raise ApiError(400, f"n times the prompts is above {MAX_CHOICES}", param=param)


def sampling_of(body: GenerationRequest, model: ServedModel, seed: int) -> SamplingParams:
    """The sampling parameters of a body, with the model's defaults for those that are None. Raises
    RequestError."""
    given, own = body, model.sampling
    penalty = own.repeat_penalty if given.repeat_penalty is None else given.repeat_penalty
    top_k = own.top_k if given.top_k is None else given.top_k
    top_p = own.top_p if given.top_p is None else given.top_p
    window = model.penalty_window if given.repeat_last_n is None else given.repeat_last_n
    sampling = SamplingParams(
        temperature=float(own.temperature if given.temperature is None else given.temperature),
        top_k=top_k if top_k > 0 else 0,
        top_p=float(top_p if top_p > MIN_TOP_P else MIN_TOP_P),
        min_p=float(own.min_p if given.min_p is None else given.min_p),
        repeat_penalty=float(
            penalty if given.repetition_penalty is None else given.repetition_penalty
        ),
        repeat_last_n=window,
        presence_penalty=float(given.presence_penalty or 0.0),
        frequency_penalty=float(given.frequency_penalty or 0.0),
        seed=seed % (MAX_UINT64 + 1),
    )
    model.check_window(sampling)
    return sampling


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, bias in biases.items():
        if not token.isdecimal() or not token.isascii() or len(token) > 10:
            raise RequestError("logit_bias", f"names {token[:32]!r}, which is no token id")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)
