"""``POST /v1/embeddings``: texts to vectors, as many at a time as there are slots."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from flask import g
from msgspec import Meta, Struct
from numpy.typing import NDArray

from contract.errors import QueueFull, RequestError, UnsupportedModel
from contract.types import Request, SamplingParams, Tenant
from harness.serve.answers import Json
from harness.serve.caller import Caller, Gone
from harness.serve.errors import ApiError, as_api_error, internal_error
from harness.serve.gate import caller_of_request, decoded
from harness.serve.generation import FAILURES
from harness.serve.ledger_store import Counts
from harness.serve.model import ServedModel
from harness.serve.openapi import Route
from harness.serve.pooling import Pool, Pooling, pooling_of, tokens_to_embed
from harness.serve.receipts.make import store_results
from harness.serve.service import Began, Service
from harness.serve.streams import CLIENT_LEFT, LOOK_SECONDS
from harness.serve.submissions import EngineStopped, Submission
from harness.serve.wire import Id
from reference.runner import HIDDEN

MOST_INPUTS = 2048
"""OpenAI's number."""
Inputs = Annotated[list[str | int | list[int]], Meta(min_length=1)]
Vector = NDArray[np.float32]


class EmbeddingRequest(Struct, forbid_unknown_fields=True):
    """``POST /v1/embeddings``. ``input`` is a text, a list of texts, the ids of one text, or a list
    of lists of ids. With ``dimensions`` the first so many are kept, before normalising."""

    input: str | Inputs
    model: Id | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: Id | None = None


EMBEDDING_ROUTES = (
    Route("POST", "/v1/embeddings", "embed", "Vectors of texts.", EmbeddingRequest),
)


class EmbeddingHandlers:
    """One method for each of EMBEDDING_ROUTES, named by it."""

    def embed(self, raw: bytes) -> Json:
        g.generates = True
        body = decoded(raw, EmbeddingRequest)
        return embed(g.service, body, g.account.tenant, caller_of_request())


def embed(service: Service, body: EmbeddingRequest, tenant: Tenant, caller: Caller) -> Json:
    """The answer to a request for vectors. Raises ApiError, RequestError, QueueFull and
    EngineStopped before anything was computed, and Began after that."""
    service.check_accepting()
    model = service.model
    model.check_name(body.model)
    pooling = _pooling(model)
    width = model.model.config.hidden
    if body.dimensions is not None and body.dimensions > width:
        raise RequestError("dimensions", f"is at most {width}, the width of {model.name}")
    prompts = texts_of(service, body, tenant)
    vectors: list[Vector] = []
    tokens = sum(map(len, prompts))
    extra: Json = {"pooling": pooling.value, "tenant": tenant.name, "tier": model.tier}
    try:
        while len(vectors) < len(prompts):
            wave = prompts[len(vectors) : len(vectors) + model.limits.slots]
            pools = [Pool(pooling, len(prompt)) for prompt in wave]
            taken = _compute(model, wave, pools, tenant, caller.gone)
            vectors += [pool.vector(body.dimensions) for pool in pools[:taken]]
        if service.receipts is not None:
            name, results = f"embd-{secrets.token_hex(12)}", list(map(_octets, vectors))
            extra["receipt"] = store_results(
                service.receipts, model, "embedding", body, tenant, name, prompts, results
            )
    except Exception as error:
        told = _told(error)
        if not vectors and isinstance(error, QueueFull | RequestError | EngineStopped):
            raise told from error
        left = told is CLIENT_LEFT
        service.metrics.embedded(tenant, 0, "cancelled" if left else "error")
        counts = Counts(requests=1, failed=int(not left), abandoned=int(left))
        service.ledger.add(tenant.id, counts)
        raise Began(told) from error
    service.metrics.embedded(tenant, tokens, "stop")
    service.ledger.add(tenant.id, Counts(requests=1, completed=1, prompt_tokens=tokens))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
            for index, vector in enumerate(vectors)
        ],
        "model": model.name,
        "system_fingerprint": model.fingerprint,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "x_zinc": extra | ({"ignored": caller.ignored} if caller.ignored else {}),
    }


def _pooling(model: ServedModel) -> Pooling:
    try:
        return pooling_of(model.model)
    except UnsupportedModel as error:
        raise ApiError(
            400, f"{model.name} makes no embeddings: {error.problem}", code="no_embeddings"
        ) from None


def texts_of(service: Service, body: EmbeddingRequest, tenant: Tenant) -> Sequence[Sequence[int]]:
    """The token ids of every text, with the end that a model was trained to read after each."""
    model = service.model
    try:
        prompts = service.prompts_of(body.input, "input", MOST_INPUTS)
    except RequestError as error:
        raise _told(error) from None
    of_texts = isinstance(body.input, str) or isinstance(body.input[0], str)
    prompts = [tokens_to_embed(model.model, prompt, of_texts) for prompt in prompts]
    most = min(model.context, tenant.max_context)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError("input", f"[{index}] is empty; give at least one token")
        if len(prompt) > most:
            raise ApiError(
                400,
                f"input[{index}] is {len(prompt)} tokens, the context is {most}",
                param="input",
                code="context_length_exceeded",
            )
    return prompts


def _compute(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    pools: Sequence[Pool],
    tenant: Tenant,
    gone: Gone,
) -> int:
    """Give pools the hidden states of their prompts; so many of them, the first ones, for which
    there was a place in the queue. Raises QueueFull when there was none."""
    driver = model.driver
    stream = driver.open_stream()
    unpenalized = SamplingParams(repeat_last_n=0)
    requests = [
        Request(driver.new_id(), tuple(prompt), 0, unpenalized, tenant=tenant.id)
        for prompt in prompts
    ]
    try:
        refused = driver.submit_to(
            stream,
            [
                Submission([request], {request.id: pool}, pool.rows_from, HIDDEN)
                for request, pool in zip(requests, pools, strict=True)
            ],
        )
        for number, error in enumerate(refused):
            if error is not None and (number == 0 or not isinstance(error, QueueFull)):
                raise error
        taken = next((n for n, error in enumerate(refused) if error is not None), len(refused))
        left = {request.id for request in requests[:taken]}
        while left:
            for delivered in stream.take(LOOK_SECONDS):
                reason = delivered.event.finish_reason
                if reason in FAILURES:
                    raise FAILURES[reason]
                left.discard(delivered.event.request_id)
            if left and gone():
                raise CLIENT_LEFT
        return taken
    finally:
        stream.cancel()


def _told(error: Exception) -> ApiError:
    """What a client is told of an error, which names the engine's field for a text otherwise."""
    if isinstance(error, ValueError):
        return ApiError(500, "the model failed on this text", code="model_failed", retry=False)
    told = as_api_error(error) or internal_error()
    return replace(told, param="input") if told.param == "prompt" else told


def _encoded(vector: Vector, body: EmbeddingRequest) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(_octets(vector)).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _octets(vector: Vector) -> bytes:
    """A vector as little-endian binary32."""
    return vector.astype("<f4").tobytes()
