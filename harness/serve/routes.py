"""The table of routes, and the handlers of general routes."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from flask import Response, g

from contract.arithmetic import PAGE_TOKENS
from contract.errors import RequestError
from harness.host.token_pieces import token_pieces
from harness.serve.answers import Json
from harness.serve.anthropic.routes import ANTHROPIC_ROUTES
from harness.serve.embeddings import EMBEDDING_ROUTES
from harness.serve.errors import ApiError
from harness.serve.gate import decoded, service_of_request
from harness.serve.llama_cpp.routes import LLAMA_CPP_ROUTES
from harness.serve.model import ServedModel
from harness.serve.model_routes import MODEL_ROUTES
from harness.serve.ollama.routes import OLLAMA_ROUTES
from harness.serve.openapi import Route, openapi_document
from harness.serve.other_formats import own_chat_fields, sent_name
from harness.serve.receipts.routes import RECEIPT_ROUTES
from harness.serve.rerank import RERANK_ROUTES
from harness.serve.responses.routes import RESPONSES_ROUTES
from harness.serve.scores import SCORE_ROUTES
from harness.serve.service import Service
from harness.serve.tenant_routes import TENANT_ROUTES
from harness.serve.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateFields,
    TemplateRequest,
    TokenizeRequest,
    given_fields,
)
from reference.engine.statistics import EngineStatistics
from reference.model.chat_template import RenderedChat

TEXT = "text/plain; version=0.0.4"
ROUTES = (
    Route(
        "POST", "/v1/chat/completions", "chat", "Answer a conversation.",
        ChatRequest, answer=Service.chat, prepare=own_chat_fields, sent_name=sent_name,
    ),
    Route(
        "POST", "/v1/completions", "complete", "Continue a text.",
        CompletionRequest, answer=Service.complete, prepare=own_chat_fields, sent_name=sent_name,
    ),
    *LLAMA_CPP_ROUTES,
    *EMBEDDING_ROUTES,
    *RERANK_ROUTES,
    *SCORE_ROUTES,
    *RESPONSES_ROUTES,
    *ANTHROPIC_ROUTES,
    *OLLAMA_ROUTES,
    *MODEL_ROUTES,
    Route("POST", "/tokenize", "tokenize", "Token ids of a text or chat.", TokenizeRequest),
    Route("POST", "/detokenize", "detokenize", "Text of token ids.", DetokenizeRequest),
    Route("GET", "/tokenizer_info", "tokenizer_info", "The model's tokenizer and template."),
    Route("POST", "/apply-template", "apply_template", "Prompt of a chat.", TemplateRequest),
    *TENANT_ROUTES,
    *RECEIPT_ROUTES,
    Route("GET", "/health", "health", "Whether the server lives. Needs no key."),
    Route("GET", "/ready", "ready", "Whether requests are taken. Needs no key."),
    Route("GET", "/version", "version", "Version and fingerprint."),
    Route("GET", "/metrics", "metrics", "Prometheus metrics, for operators.", produces=TEXT),
    Route("GET", "/openapi.json", "openapi", "This document."),
)  # fmt: skip


@cache
def _document(version: str) -> Json:
    """The OpenAPI document, made at the first request: making it takes a quarter of the server's
    start."""
    return openapi_document(ROUTES, version)


def _context_facts(model: ServedModel, now: EngineStatistics) -> Json:
    """The size of the KV cache and its use, in tokens."""
    used = now.pages - now.free_pages - now.cached_pages
    return {
        "slots": now.slots,
        "tokens_per_slot": model.context,
        "reserved_tokens": now.pages * PAGE_TOKENS,
        "active_tokens": used * PAGE_TOKENS,
        "cached_tokens": now.cached_pages * PAGE_TOKENS,
    }


class Handlers:
    """A method for each general route, by its name. Each answers the current request."""

    def __init__(self, version: str) -> None:
        self._version = version

    @property
    def _service(self) -> Service:
        return service_of_request()

    @property
    def _model(self) -> ServedModel:
        return self._service.model

    def tokenize(self, raw: bytes) -> Json:
        body = decoded(raw, TokenizeRequest, own_chat_fields)
        self._model.check_name(body.model)
        given = [one for one in (body.prompt, body.content, body.messages) if one is not None]
        if len(given) != 1:
            raise RequestError("prompt", "or messages is needed, and not both")
        if body.messages is not None:
            tokens = self._model.encode_chat(self._rendered(body))
        else:
            text, field = body.prompt, "prompt"
            if text is None:
                text, field = body.content or "", "content"
            self._model.check_length(text, field)
            tokens = self._model.encode(
                text, parse_special=body.parse_special, add_special_tokens=adds_bos(body)
            )
        answer: Json = {
            "tokens": token_pieces(self._model.tokenizer, tokens) if body.with_pieces else tokens,
            "count": len(tokens),
            "max_model_len": self._model.context,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = list(map(self._model.tokenizer.token_text, tokens))
        return answer

    def tokenizer_info(self) -> Json:
        """The tokenizer's properties, for clients without the tokenizer."""
        model, tokenizer = self._model, self._model.tokenizer
        names = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, **tokenizer.named_ids}
        answer: Json = {
            "tokenizer_class": "GGUF",
            "model_max_length": model.context,
            "vocab_size": tokenizer.vocab_size,
            "add_bos_token": tokenizer.add_bos,
            "chat_template": None if model.template is None else model.template.text,
            "end_token_ids": sorted(tokenizer.eog_ids),
        }
        for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"):
            token = names.get(name)
            answer[f"{name}_token"] = None if token is None else tokenizer.token_text(token)
            answer[f"{name}_token_id"] = token
        return answer

    def detokenize(self, raw: bytes) -> Json:
        body = decoded(raw, DetokenizeRequest)
        self._model.check_name(body.model)
        vocab = self._model.model.config.vocab
        if any(not 0 <= token < vocab for token in body.tokens):
            raise RequestError("tokens", f"holds an id outside 0 to {vocab - 1}")
        raw = self._model.tokenizer.decode_bytes(body.tokens, special=True)
        text = raw.decode(errors="replace")
        return {"prompt": text, "content": text}

    def apply_template(self, raw: bytes) -> Json:
        body = decoded(raw, TemplateRequest, own_chat_fields)
        self._model.check_name(body.model)
        return {"prompt": self._rendered(body).text}

    def _rendered(self, body: TemplateFields) -> RenderedChat:
        """The prompt of a conversation, as chat completions would render it."""
        fields = given_fields(body, TemplateFields.__struct_fields__)
        return self._model.chat_plan(ChatRequest(**fields)).prompt

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
            "context": _context_facts(self._model, now),
            "memory": self._model.memory(),
            **({} if now.disk is None else {"disk_cache": asdict(now.disk)}),
        }

    def ready(self) -> Json:
        self._service.check_accepting()
        named = {} if self._service.accounts.keyed else {"model": self._model.name}
        return {"status": "ready", **named}

    def version(self) -> Json:
        return {"version": self._version, "fingerprint": self._model.fingerprint}

    def metrics(self) -> bytes:
        if not g.account.operator:
            raise ApiError(403, "metrics tell of all tenants; ask with an operator's key")
        return self._service.metrics.text()

    def openapi(self) -> Json:
        return _document(self._version)


def adds_bos(body: TokenizeRequest) -> bool:
    """Whether a BOS goes in front of a text. Default: only of a text in vLLM's ``prompt``."""
    for given in (body.add_special_tokens, body.add_special):
        if given is not None:
            return given
    return body.content is None
