"""Routes of Ollama's API that its clients use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import monotonic

from contract.errors import RequestError
from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.embeddings import EmbeddingRequest, embed
from harness.serve.errors import renaming
from harness.serve.http_request import HttpRequest
from harness.serve.model import LATEST, ServedModel
from harness.serve.model_routes import known_model
from harness.serve.ollama.parse import (
    chat_of,
    chat_of_prompt,
    client_name,
    plain_schemas,
    prompt_name,
    text_of_prompt,
)
from harness.serve.ollama.render import (
    NANOSECONDS,
    OllamaShape,
    error_line,
    line,
    listed,
    now,
    running,
    shown,
)
from harness.serve.ollama.wire import (
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaPullRequest,
    ShowRequest,
)
from harness.serve.pulls import Pull, pull_whole
from harness.serve.route import Route
from harness.serve.service import Answered, Service


def ollama_chat(
    service: Service, body: OllamaChatRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer a conversation, whole or streamed. Raises what ``Service.chat`` raises."""
    if not body.messages:
        return _loaded(service, body.model, {"message": {"role": "assistant", "content": ""}})
    return service.chat(chat_of(body), tenant, caller, OllamaShape, "ollama-")


def ollama_generate(
    service: Service, body: GenerateRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer or continue a prompt. Raises what ``Service.chat`` raises."""
    if not body.prompt:
        return _loaded(service, body.model, {"response": ""})
    if body.raw or body.suffix or service.model.template is None:
        shape = partial(OllamaShape, text=True, plain=True)
        return service.complete(text_of_prompt(body), tenant, caller, shape, "ollama-")
    shape = partial(OllamaShape, text=True)
    return service.chat(chat_of_prompt(body), tenant, caller, shape, "ollama-")


def _loaded(service: Service, name: str, empty_answer: Json) -> Json:
    """The answer to a request without a prompt, which only loads the model."""
    service.model.check_name(name)
    head = {"model": service.model.name, "created_at": now()}
    return head | empty_answer | {"done": True, "done_reason": "load"}


def ollama_embed(service: Service, body: EmbedRequest, tenant: Tenant, caller: Caller) -> Json:
    """The vectors of texts. Raises as ``embed`` does."""
    texts: str | list[str | int | list[int]]
    texts = body.input if isinstance(body.input, str) else [*body.input]
    request = EmbeddingRequest(texts, body.model, dimensions=body.dimensions)
    began = monotonic()
    answer = embed(service, request, tenant, caller)
    return {
        "model": answer["model"],
        "embeddings": [one["embedding"] for one in answer["data"]],
        "total_duration": int((monotonic() - began) * NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": answer["usage"]["prompt_tokens"],
    }


def ollama_embed_one(
    service: Service, body: OldEmbedRequest, tenant: Tenant, caller: Caller
) -> Json:
    """The vector of a text. Raises as ``embed`` does."""
    answer = embed(service, EmbeddingRequest(body.prompt, body.model), tenant, caller)
    return {"embedding": answer["data"][0]["embedding"]}


def ollama_show(incoming: HttpRequest, body: ShowRequest) -> Json:
    """The facts of a model. Raises ApiError and RequestError."""
    incoming.model.check_name(_named(body))
    return shown(incoming.model)


def ollama_tags(incoming: HttpRequest) -> Json:
    """The models that requests may name."""
    return {"models": [listed(model) for model in _in_memory(incoming)]}


def ollama_ps(incoming: HttpRequest) -> Json:
    """The models in memory."""
    return {"models": [running(model) for model in _in_memory(incoming)]}


def ollama_version(incoming: HttpRequest) -> Json:
    """The version of this server."""
    return {"version": incoming.server.version}


def ollama_pull(incoming: HttpRequest, body: OllamaPullRequest) -> Answered:
    """Fetch a model. Raises ApiError and RequestError."""
    pull = incoming.server.pulls.begin(known_model(_named(body).removesuffix(LATEST)))
    if body.stream:
        return _progress(pull)
    pull_whole(pull)
    return {"status": "success"}


def _named(body: ShowRequest | OllamaPullRequest) -> str:
    """The model that a body names, by either name of the field. Raises RequestError."""
    name = body.model or body.name
    if name is None:
        raise RequestError("model", "is needed")
    return name


def _in_memory(incoming: HttpRequest) -> Iterator[ServedModel]:
    """The models in memory, the active one first."""
    yield incoming.model
    with incoming.server.models.held() as others:
        yield from (model for model in others.values() if model is not None)


def _progress(pull: Pull) -> Iterator[bytes]:
    """The progress of a pull as lines. The last one reports success or the error."""
    for state in pull.states():
        if state is None:
            yield b""
        elif state["status"] not in ("done", "failed"):
            sizes = {name: state[name] for name in ("completed", "total") if state[name]}
            yield line({"status": state["status"], "digest": state["model"], **sizes})
    yield line({"status": "success"}) if pull.error is None else error_line(pull.error) + b"\n"


_route = partial(
    Route, errors=error_line, error_schema="OllamaError", streams="application/x-ndjson"
)
_generating = partial(_route, generates=True)
OLLAMA_ROUTES = (
    _generating(
        "POST", "/api/chat", ollama_chat, "Answer, as Ollama does.",
        OllamaChatRequest, prepare=plain_schemas, client_name=client_name,
    ),
    _generating(
        "POST", "/api/generate", ollama_generate, "Answer a prompt.", GenerateRequest,
        client_name=prompt_name,
    ),
    _generating("POST", "/api/embed", ollama_embed, "Vectors of texts.", EmbedRequest),
    _generating(
        "POST", "/api/embeddings", ollama_embed_one, "Vector of a text.", OldEmbedRequest,
        client_name=renaming({"input": "prompt"}),
    ),
    _route("POST", "/api/show", ollama_show, "What a model is.", ShowRequest),
    _route(
        "POST", "/api/pull", ollama_pull, "Fetch a model. For admins.", OllamaPullRequest,
        admin=True,
    ),
    _route("GET", "/api/tags", ollama_tags, "The models that may be asked."),
    _route("GET", "/api/ps", ollama_ps, "The models in memory."),
    _route("GET", "/api/version", ollama_version, "The server's version."),
)  # fmt: skip
