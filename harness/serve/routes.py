"""The table of routes, and what each answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flask import Response, g, request
from msgspec import Struct

from contract.errors import RequestError
from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service
from harness.serve.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    decode,
)
from harness.tenants import Account

TEXT = "text/plain; version=0.0.4; charset=utf-8"
ROUTES = (
    Route("POST", "/v1/chat/completions", "chat", "Answer a conversation.", ChatRequest),
    Route("POST", "/v1/completions", "complete", "Continue a text.", CompletionRequest),
    Route("GET", "/v1/models", "models", "The models served here."),
    Route("GET", "/v1/models/<path:model>", "one_model", "One of them."),
    Route("POST", "/tokenize", "tokenize", "Token ids of a text or chat.", TokenizeRequest),
    Route("POST", "/detokenize", "detokenize", "Text of token ids.", DetokenizeRequest),
    Route("POST", "/apply-template", "apply_template", "Prompt of a chat.", TemplateRequest),
    Route("GET", "/v1/tenants/<tenant>/usage", "usage", "What a tenant was given."),
    Route("GET", "/health", "health", "Whether the server lives. Needs no key."),
    Route("GET", "/ready", "ready", "Whether requests are taken."),
    Route("GET", "/version", "version", "Version and fingerprint."),
    Route("GET", "/metrics", "metrics", "Prometheus metrics, for operators.", produces=TEXT),
    Route("GET", "/openapi.json", "openapi", "This document."),
)

Body = TypeVar("Body", bound=Struct)


class Handlers:
    """One method for each route, named by it. ``fixed`` are answers that never change."""

    def __init__(self, service: Service) -> None:
        self.fixed: dict[str, Json] = {}
        self._service = service
        self._model = service.model

    def chat(self, raw: bytes) -> Answered:
        return self._generate(raw, ChatRequest, self._service.chat)

    def complete(self, raw: bytes) -> Answered:
        return self._generate(raw, CompletionRequest, self._service.complete)

    def models(self) -> Json:
        return {"object": "list", "data": [self._described()]}

    def one_model(self, model: str) -> Json:
        self._model.check_name(model)
        return self._described()

    def tokenize(self, raw: bytes) -> Json:
        body = decode(raw, TokenizeRequest)
        self._model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "or messages is needed, and not both")
        if body.messages is not None:
            tokens = self._model.encode_chat(body.messages, body.chat_template_kwargs)
        else:
            tokens = self._model.encode(body.prompt or "")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._model.context}

    def detokenize(self, raw: bytes) -> Json:
        body = decode(raw, DetokenizeRequest)
        self._model.check_name(body.model)
        vocab = self._model.model.config.vocab
        if any(not 0 <= token < vocab for token in body.tokens):
            raise RequestError("tokens", f"holds an id outside 0 to {vocab - 1}")
        text = self._model.tokenizer.decode_bytes(body.tokens, special=True)
        return {"prompt": text.decode(errors="replace")}

    def apply_template(self, raw: bytes) -> Json:
        body = decode(raw, TemplateRequest)
        self._model.check_name(body.model)
        return {"prompt": self._model.render(body.messages, body.chat_template_kwargs).text}

    def usage(self, tenant: str) -> Json:
        asking: Account = g.account
        account = self._service.accounts.named(tenant)
        if account is None or not (asking.operator or account.tenant.id == asking.tenant.id):
            raise ApiError(404, "there is no such tenant, or it is another's", param="tenant")
        return self._service.usage(account)

    def health(self) -> Response | Json:
        driver = self._model.driver
        if driver.failure is not None:
            raise ApiError(503, driver.failure, code="engine_stopped", retry=False)
        status = "draining" if self._service.draining.is_set() else "ok"
        if self._service.accounts.keyed:
            return {"status": status}
        now = driver.statistics
        return {
            "status": status,
            "model": self._model.name,
            "active": now.running,
            "queued": now.waiting,
        }

    def ready(self) -> Json:
        self._service.check_accepting()
        return {"status": "ready", "model": self._model.name}

    def version(self) -> Json:
        return self.fixed["version"]

    def metrics(self) -> bytes:
        if not g.account.operator:
            raise ApiError(403, "metrics tell of all tenants; ask with an operator's key")
        return self._service.metrics.text()

    def openapi(self) -> Json:
        return self.fixed["openapi"]

    def _generate(
        self,
        raw: bytes,
        kind: type[Body],
        answer: Callable[[Body, Any, Callable[[], bool]], Answered],
    ) -> Answered:
        g.generates = True
        gone: Callable[[], bool] = request.environ.get("waitress.client_disconnected", _stays)
        body = decode(raw, kind)
        return answer(body, g.account.tenant, gone)

    def _described(self) -> Json:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "zinc-rt",
            "x_zinc": {
                "fingerprint": model.fingerprint,
                "context": model.context,
                "slots": model.limits.slots,
                "tier": model.tier,
                "device": model.device,
                "chat": model.template is not None,
                "thinking": model.template is not None and model.template.has_thinking_toggle,
            },
        }


def _stays() -> bool:
    """Where the server cannot tell, the client is there."""
    return False
