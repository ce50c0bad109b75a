"""Routes of Ollama's API that its clients use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import monotonic

from flask import g

from contract.errors import RequestError
from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.caller import Caller, in_names_of
from harness.serve.embeddings import EmbeddingRequest, embed
from harness.serve.errors import naming_fields, renaming
from harness.serve.gate import caller_of_request, decoded, need_admin, service_of_request
from harness.serve.model import ServedModel
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
from harness.serve.openapi import Route
from harness.serve.pulls import Pull, Pulls, pull_whole
from harness.serve.server_models import ServerModels
from harness.serve.service import Answered, Service

_route = partial(
    Route, errors=error_line, error_schema="OllamaError", streams="application/x-ndjson"
)
OLLAMA_ROUTES = (
    _route("POST", "/api/chat", "ollama_chat", "Answer, as Ollama does.", OllamaChatRequest),
    _route("POST", "/api/generate", "ollama_generate", "Answer a prompt.", GenerateRequest),
    _route("POST", "/api/embed", "ollama_embed", "Vectors of texts.", EmbedRequest),
    _route("POST", "/api/embeddings", "ollama_embed_one", "Vector of a text.", OldEmbedRequest),
    _route("POST", "/api/show", "ollama_show", "What a model is.", ShowRequest),
    _route("POST", "/api/pull", "ollama_pull", "Fetch a model. For admins.", OllamaPullRequest),
    _route("GET", "/api/tags", "ollama_tags", "The models that may be asked."),
    _route("GET", "/api/ps", "ollama_ps", "The models in memory."),
    _route("GET", "/api/version", "ollama_version", "The server's version."),
)


class OllamaHandlers:
    """A method for each route of OLLAMA_ROUTES, by its name."""

    def __init__(self, models: ServerModels, pulls: Pulls, version: str) -> None:
        self._models = models
        self._pulls = pulls
        self._version = version

    def ollama_chat(self, raw: bytes) -> Answered:
        body = decoded(raw, OllamaChatRequest, plain_schemas)
        if not body.messages:
            return _loaded(body.model, {"message": {"role": "assistant", "content": ""}})
        g.generates = True
        return answer_chat(service_of_request(), body, g.account.tenant, caller_of_request())

    def ollama_generate(self, raw: bytes) -> Answered:
        body = decoded(raw, GenerateRequest)
        if not body.prompt:
            return _loaded(body.model, {"response": ""})
        g.generates = True
        return answer_prompt(service_of_request(), body, g.account.tenant, caller_of_request())

    def ollama_embed(self, raw: bytes) -> Json:
        body = decoded(raw, EmbedRequest)
        texts: str | list[str | int | list[int]]
        texts = body.input if isinstance(body.input, str) else [*body.input]
        request = EmbeddingRequest(texts, body.model, dimensions=body.dimensions)
        began = monotonic()
        answer = _vectors(request)
        return {
            "model": answer["model"],
            "embeddings": [one["embedding"] for one in answer["data"]],
            "total_duration": int((monotonic() - began) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": answer["usage"]["prompt_tokens"],
        }

    def ollama_embed_one(self, raw: bytes) -> Json:
        body = decoded(raw, OldEmbedRequest)
        with naming_fields(renaming({"input": "prompt"})):
            answer = _vectors(EmbeddingRequest(body.prompt, body.model))
        return {"embedding": answer["data"][0]["embedding"]}

    def ollama_show(self, raw: bytes) -> Json:
        body = decoded(raw, ShowRequest)
        name = body.model or body.name
        if name is None:
            raise RequestError("model", "is needed")
        model = service_of_request().model
        model.check_name(name)
        return shown(model)

    def ollama_tags(self) -> Json:
        return {"models": [listed(model) for model in self._in_memory()]}

    def ollama_ps(self) -> Json:
        return {"models": [running(model) for model in self._in_memory()]}

    def ollama_version(self) -> Json:
        return {"version": self._version}

    def ollama_pull(self, raw: bytes) -> Answered:
        need_admin()
        body = decoded(raw, OllamaPullRequest)
        name = body.model or body.name
        if name is None:
            raise RequestError("model", "is needed")
        pull = self._pulls.begin(known_model(name.removesuffix(":latest")))
        if body.stream:
            return _progress(pull)
        pull_whole(pull)
        return {"status": "success"}

    def _in_memory(self) -> Iterator[ServedModel]:
        """The models in memory, the active one first."""
        yield service_of_request().model
        with self._models.held() as others:
            yield from (model for model in others.values() if model is not None)


@in_names_of(client_name)
def answer_chat(
    service: Service, body: OllamaChatRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer a conversation, whole or streamed. Raises what ``Service.chat`` raises."""
    return service.chat(chat_of(body), tenant, caller, OllamaShape, "ollama-")


@in_names_of(prompt_name)
def answer_prompt(
    service: Service, body: GenerateRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer or continue a prompt. Raises what ``Service.chat`` raises."""
    if body.raw or body.suffix or service.model.template is None:
        shape = partial(OllamaShape, text=True, plain=True)
        return service.complete(text_of_prompt(body), tenant, caller, shape, "ollama-")
    shape = partial(OllamaShape, text=True)
    return service.chat(chat_of_prompt(body), tenant, caller, shape, "ollama-")


def _vectors(request: EmbeddingRequest) -> Json:
    g.generates = True
    return embed(service_of_request(), request, g.account.tenant, caller_of_request())


def _loaded(name: str, empty_answer: Json) -> Json:
    """The answer to a request without a prompt, which only loads the model."""
    model = service_of_request().model
    model.check_name(name)
    head = {"model": model.name, "created_at": now()}
    return head | empty_answer | {"done": True, "done_reason": "load"}


def _progress(pull: Pull) -> Iterator[bytes]:
    """The progress of a pull as lines. The last one reports success or the error."""
    for state in pull.states():
        if state is None:
            yield b""
        elif state["status"] not in ("done", "failed"):
            sizes = {name: state[name] for name in ("completed", "total") if state[name]}
            yield line({"status": state["status"], "digest": state["model"], **sizes})
    yield line({"status": "success"}) if pull.error is None else error_line(pull.error) + b"\n"
