"""Repeats a request and compares the answer with a saved one: all bytes must be equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import msgspec

from contract.errors import ConfigError
from contract.types import LOCAL_TENANT, MAX_INT32, Tenant
from harness.progress import SILENT, Progress
from harness.sampling_defaults import SamplingDefaults, sampling_defaults
from harness.serve.caller import Caller
from harness.serve.model import CONTEXT, WINDOW, ServedModel
from harness.serve.receipts.verify import shown_steps, uncounted_service
from harness.serve.routes import ROUTES
from harness.serve.service import Answered, FailedWhileRunning, Service
from harness.serve.strict_json import loads
from harness.serve.wire import MAX_SEED, NO_SEEDS
from reference.engine import Engine

Json = dict[str, Any]
NOTHING = object()
MAX_SHOWN = 200
"""Most characters of a value that a difference shows."""
MAX_VALUE = 1 << 20
"""The longest reach of penalties and the longest context that a verification takes over."""
MESSAGE = "message"
CACHE_READ, CACHE_WRITTEN = "cache_read_input_tokens", "cache_creation_input_tokens"
FROM_CACHE = ("cached_tokens", "cache_write_tokens")
"""Counts of tokens that came from the cache."""
OLLAMA_ENDS = ("done_reason", "prompt_eval_count", "eval_count")
NOT_ASKED = ("stream", "stream_options", "model", "lora")
"""Fields of a request that cannot change the tokens of its answer, or that the answer repeats."""
BY_FIELD = (("output", "respond"), ("results", "rerank"), ("data", "embed"))
"""Fields of answers with the routes that make them; answers with scores have ``data``, too."""
NO_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": MAX_INT32}
"""OpenAI's sampling: no filter and no limit."""


def first_difference(
    model: ServedModel, request: Json, response: Json, progress: Progress = SILENT
) -> str | None:
    """The first difference between ``response``, a whole answer of a server, and the answer of
    ``model`` to ``request``; None if they are equal. ``progress`` counts computed tokens. The seed
    comes from the request or the response. Raises ConfigError for a response that cannot be
    verified, and ApiError for a refused request."""
    try:
        scales = model.adapters.found(_extra(response).get("lora") or ())
    except KeyError as missing:
        return f"adapter: {missing.args[0][:16]} answered and is not open; name it with --lora"
    except (TypeError, ValueError):
        raise ConfigError("the response names its adapters in no known form") from None
    model = model.with_adapters(scales) if scales else model
    fingerprint = response.get("system_fingerprint")
    if fingerprint is None:
        raise ConfigError(
            "the response cannot be verified: it names no system_fingerprint, so what "
            "computed it is not known"
        )
    if fingerprint != model.fingerprint:
        return f"system_fingerprint: {fingerprint} answered, this is {model.fingerprint}"
    fields = {k: v for k, v in request.items() if k not in NOT_ASKED}
    then = _comparable(response)
    if fields.get("seed") in NO_SEEDS and response.get("object") != "list":
        fields["seed"] = _drawn_seed(response)
    window, context = server_value(response, WINDOW), server_value(response, CONTEXT)
    model = replace(model, sampling=_defaults_of(response))
    if window is not None:
        model = replace(model, penalty_window=window)
    tenant = LOCAL_TENANT if not context else replace(LOCAL_TENANT, max_context=context)
    model.driver.call(Engine.replace_tenants, [tenant])
    now = _comparable(_answer(model, fields, response, tenant, progress))
    for name in now:
        if name == "usage" and tells_no_usage(response):
            continue
        difference = _difference(name, then[name], now[name])
        if difference is not None:
            return difference
    return None


def tells_no_usage(response: Json) -> bool:
    """Whether the answer was streamed without usage counts."""
    named = ("object", "type", "eval_count")  # other answers' kinds, and the count of Ollama's
    return response.get("usage") is None and not any(name in response for name in named)


def _defaults_of(response: Json) -> SamplingDefaults:
    """The sampling defaults of the server that answered. Old answers do not have them."""
    values = _extra(response).get("sampling_defaults")
    return sampling_defaults({}, given=values if isinstance(values, dict) else NO_DEFAULTS)


def server_value(response: Json, name: str) -> int | None:
    """A setting of the server that answered, WINDOW or CONTEXT; None if the answer does not name
    it or its value is not valid."""
    values = _extra(response).get("sampling_defaults")
    value = values.get(name) if isinstance(values, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_VALUE else None


def _comparable(response: Json) -> Json:
    """The fields of an answer that must be equal in every correct answer to the request. Raises
    ConfigError for an answer without content."""
    digests = {"logits_sha256": _extra(response).get("logits_sha256"), "usage": _usage(response)}
    if response.get("type") == MESSAGE:
        ends = {name: response.get(name) for name in ("stop_reason", "stop_sequence")}
        return {"content": response.get("content"), **ends, **digests}
    if "done_reason" in response:
        ends = {name: response.get(name) for name in OLLAMA_ENDS}
        message = response.get("message")
        texts = {name: response.get(name) for name in ("response", "thinking", "logprobs")}
        return {"message": message, **texts, **ends}
    output = response.get("output")
    if isinstance(output, list) and all(isinstance(item, dict) for item in output):
        named = [{key: item[key] for key in item if key != "id"} for item in output]
        ends = {name: response.get(name) for name in ("status", "incomplete_details")}
        return {"output": named, **ends, **digests}
    for name in ("choices", "data", "results"):
        if isinstance(response.get(name), list) and response[name]:
            return {name: list(map(_without_empty, response[name])), **digests}
    raise ConfigError("the response has no choices, no output and no vectors: it is no answer")


def _usage(response: Json) -> Json | None:
    """The token counts that must be equal: without cache counts. None if the answer has none."""
    usage = response.get("usage", {})
    if not isinstance(usage, dict):
        return None
    if CACHE_READ in usage:
        # How many prompt tokens were cached depends on the server; the sum does not.
        prompt = sum(usage.get(name) or 0 for name in (CACHE_READ, CACHE_WRITTEN, "input_tokens"))
        return {"input_tokens": prompt, "output_tokens": usage.get("output_tokens")}
    return _counts(usage)


def _counts(usage: Json) -> Json:
    """A usage without the counts of cached tokens, which depend on other requests."""
    return {
        name: _counts(value) if isinstance(value, dict) else value
        for name, value in usage.items()
        if name not in FROM_CACHE
    }


def _without_empty(choice: object) -> object:
    """A choice with null instead of empty log-probabilities, as streams have them."""
    if isinstance(choice, dict) and isinstance(choice.get("logprobs"), dict):
        return choice if any(choice["logprobs"].values()) else choice | {"logprobs": None}
    return choice


def _answer(
    model: ServedModel, fields: Json, response: Json, tenant: Tenant, progress: Progress
) -> Json:
    with uncounted_service(model) as service, shown_steps(model.driver, progress):
        try:
            answered = _ask(service, fields, response, tenant)
        except FailedWhileRunning as failed:
            raise failed.error from None
    assert isinstance(answered, dict)
    # Compare numbers as they are after encoding and decoding.
    written: Json = loads(msgspec.json.encode(answered))
    return written


def _ask(service: Service, fields: Json, response: Json, tenant: Tenant) -> Answered:
    """Answer a request by the route that made the saved answer."""
    if "done_reason" in response:
        name = "ollama_chat" if "messages" in fields else "ollama_generate"
        # Ollama's seed is an option, and its answers are streamed unless told otherwise.
        options = {"seed": fields["seed"]} | (fields.get("options") or {})
        fields = fields | {"options": options, "stream": False}
        del fields["seed"]
    elif response.get("type") == MESSAGE:
        name = "message"
    elif "messages" in fields:
        name = "chat"
    elif _lists_scores(response):
        name = "score"
    else:
        name = next((route for field, route in BY_FIELD if field in response), "complete")
    route = next(route for route in ROUTES if route.name == name)
    raw = msgspec.json.encode(fields | {"model": service.model.name})
    answered: Answered = route.answer_to(service, raw, tenant, Caller(), [])
    return answered


def _lists_scores(response: Json) -> bool:
    data = response.get("data")
    return isinstance(data, list) and all(
        isinstance(one, dict) and one.get("object") == "score" for one in data
    )


def _difference(path: str, then: object, now: object) -> str | None:
    """The first path at which two JSON values differ, with both values; None if they are equal."""
    if isinstance(then, dict) and isinstance(now, dict) and then.keys() == now.keys():
        parts = [(f"{path}.{key}", then[key], now[key]) for key in now]
    elif isinstance(then, list) and isinstance(now, list):
        pairs = enumerate(zip_longest(then, now, fillvalue=NOTHING))
        parts = [(f"{path}[{i}]", *pair) for i, pair in pairs]
    elif isinstance(then, str) and isinstance(now, str) and then != now:
        at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
        at = min(len(then), len(now)) if at is None else at
        return f"{path}: character {at}: {then[at : at + 20]!r} then, {now[at : at + 20]!r} now"
    else:
        return None if then == now else f"{path}: {_shown(then)} then, {_shown(now)} now"
    for part in parts:
        found = _difference(*part)
        if found is not None:
            return found
    return None


def _shown(value: object) -> str:
    shown = "nothing" if value is NOTHING else repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def _drawn_seed(response: Json) -> int:
    seed = _extra(response).get("seed")
    if type(seed) is not int:
        raise ConfigError("neither the request nor the response names a seed, so none is known")
    if seed > MAX_SEED:
        raise ConfigError(f"no request has the response's seed, {seed}; -1 asks for a drawn one")
    return seed


def _extra(response: Json) -> Json:
    extra = response.get("x_zinc")
    return extra if isinstance(extra, dict) else {}
