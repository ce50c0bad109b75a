"""Replaying an answer: the same request on the same function gives the same bytes, or a place."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from contract.errors import ConfigError
from contract.types import LOCAL_TENANT
from harness.serve.accounts import Accounts
from harness.serve.ledger_store import LedgerStore
from harness.serve.metrics import Metrics
from harness.serve.model import ServedModel
from harness.serve.service import Began, Service
from harness.serve.strict_json import BadJson, loads
from harness.serve.wire import ChatRequest, CompletionRequest, decode

Json = dict[str, Any]


def read_object(path: Path) -> Json:
    """The JSON object a file holds. Raises ConfigError."""
    try:
        value = loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except BadJson as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is no JSON object")
    return value


def first_difference(model: ServedModel, request: Json, response: Json) -> str | None:
    """Where the answer of ``model`` to ``request`` differs from ``response``, a whole answer of a
    server; None when it does not. The seed is that of the request, or of the response.

    Raises ConfigError for a response that does not say what made it, ApiError for a request that
    is refused.
    """
    fingerprint = response.get("system_fingerprint")
    if fingerprint != model.fingerprint:
        return f"system_fingerprint: {fingerprint} answered, this is {model.fingerprint}"
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ConfigError("the response has no choices; verify an answer that was not streamed")
    asked = {k: v for k, v in request.items() if k not in ("stream", "stream_options", "model")}
    if asked.get("seed") is None:
        asked["seed"] = _drawn_seed(response)
    answered = _answer(model, asked)
    replayed = answered["choices"]
    if len(choices) != len(replayed):
        return f"choices: {len(choices)} then, {len(replayed)} now"
    for index, (then, now) in enumerate(zip(choices, replayed, strict=True)):
        place = _difference(f"choices[{index}]", then, now)
        if place is not None:
            return place
    digests = _extra(response).get("logits_sha256")
    return _difference("logits_sha256", digests, answered["x_zinc"].get("logits_sha256"))


def _answer(model: ServedModel, asked: Json) -> Json:
    with (
        tempfile.TemporaryDirectory() as folder,
        LedgerStore(Path(folder) / "ledger.sqlite") as ledger,
    ):
        service = Service(model, Accounts(None), ledger, Metrics(model.name, model.driver))
        raw = msgspec.json.encode(asked)
        try:
            if "messages" in asked:
                answered = service.chat(decode(raw, ChatRequest), LOCAL_TENANT, _stays)
            else:
                answered = service.complete(decode(raw, CompletionRequest), LOCAL_TENANT, _stays)
        except Began as failed:
            raise failed.error from None
    assert isinstance(answered, dict)
    # What a client reads is what was written: numbers as JSON has them.
    written: Json = loads(msgspec.json.encode(answered))
    return written


def _difference(place: str, then: object, now: object) -> str | None:
    """The first place where two JSON values differ, and how."""
    if isinstance(then, dict) and isinstance(now, dict) and then.keys() == now.keys():
        parts = [(f"{place}.{key}", then[key], now[key]) for key in now]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        parts = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip(then, now, strict=True))]
    elif isinstance(then, str) and isinstance(now, str) and then != now:
        at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
        at = min(len(then), len(now)) if at is None else at
        return f"{place}: character {at}: {then[at : at + 20]!r} then, {now[at : at + 20]!r} now"
    else:
        return None if then == now else f"{place}: {then!r} then, {now!r} now"
    for part in parts:
        found = _difference(*part)
        if found is not None:
            return found
    return None


def _drawn_seed(response: Json) -> int:
    seed = _extra(response).get("seed")
    if type(seed) is not int:
        raise ConfigError("neither the request nor the response names a seed, so none is known")
    return seed


def _extra(response: Json) -> Json:
    extra = response.get("x_zinc")
    return extra if isinstance(extra, dict) else {}


def _stays() -> bool:
    return False
