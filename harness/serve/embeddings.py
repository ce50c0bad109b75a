"""``POST /v1/embeddings``: the vectors of texts. As many texts run at once as there are slots."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from contract.arrays import Floats
from contract.errors import RequestError, UnsupportedModel
from contract.types import Tenant
from harness.host.pooling import Pool, Pooling, pooling_of, tokens_to_embed
from harness.host.submissions import Submission
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.errors import ApiError
from harness.serve.model import ServedModel
from harness.serve.readings import Inputs, Reading, checked_inputs, input_ids, read_texts, rows_of
from harness.serve.route import Route
from harness.serve.service import Service
from harness.serve.wire import Id
from reference.runner import HIDDEN

Vector = Floats


class EmbeddingRequest(Struct, forbid_unknown_fields=True):
    """``POST /v1/embeddings``. ``input`` is a text, a list of texts, the ids of one text, or a list
    of lists of ids. With ``dimensions`` a vector is cut to that many numbers before it is
    normalised."""

    input: str | Inputs
    model: Id | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: Id | None = None


def embed(service: Service, body: EmbeddingRequest, tenant: Tenant, caller: Caller) -> Json:
    """Answer a request for embeddings. Raises ApiError, RequestError, QueueFull and EngineStopped
    before anything was computed, and FailedWhileRunning after that."""
    service.check_accepting()
    model = service.model.for_request(body.model)
    pooling = _pooling(model)
    width = model.model.config.hidden
    if body.dimensions is not None and body.dimensions > width:
        raise RequestError("dimensions", f"is at most {width}, the width of {model.name}")
    prompts = texts_of(service, body, tenant)

    def begin(index: int) -> tuple[Submission, Callable[[], Vector]]:
        pool = Pool(pooling, len(prompts[index]))
        submission = rows_of(model, prompts[index], pool, HIDDEN, tenant)
        return submission, lambda: pool.vector(body.dimensions)

    reading = Reading(service, model, "embedding", body, prompts, tenant, caller)
    vectors, common = read_texts(reading, begin, _octets, {"pooling": pooling.value})
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
            for index, vector in enumerate(vectors)
        ],
        **common,
    }


def _pooling(model: ServedModel) -> Pooling:
    try:
        return pooling_of(model.model)
    except UnsupportedModel as error:
        raise ApiError(
            400, f"{model.name} makes no embeddings: {error.problem}", code="no_embeddings"
        ) from None


def texts_of(service: Service, body: EmbeddingRequest, tenant: Tenant) -> Sequence[Sequence[int]]:
    """The token ids of every text, with the end token if the model was trained with one."""
    model = service.model
    of_texts = isinstance(body.input, str) or isinstance(body.input[0], str)
    prompts = [
        tokens_to_embed(model.model, prompt, of_texts) for prompt in input_ids(service, body.input)
    ]
    return checked_inputs(model, prompts, tenant)


def _encoded(vector: Vector, body: EmbeddingRequest) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(_octets(vector)).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _octets(vector: Vector) -> bytes:
    """A vector as little-endian binary32."""
    return vector.astype("<f4").tobytes()


EMBEDDING_ROUTES = (
    Route("POST", "/v1/embeddings", embed, "Vectors of texts.", EmbeddingRequest, generates=True),
)
