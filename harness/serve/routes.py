"""The table of routes, and the handlers of general routes."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from contract.arithmetic import PAGE_TOKENS
from contract.errors import RequestError
from harness.host.token_pieces import token_pieces
from harness.serve.answers import Json
from harness.serve.anthropic.routes import ANTHROPIC_ROUTES
from harness.serve.embeddings import EMBEDDING_ROUTES
from harness.serve.errors import ApiError
from harness.serve.http_request import HttpRequest
from harness.serve.llama_cpp.routes import LLAMA_CPP_ROUTES
from harness.serve.model import ServedModel
from harness.serve.model_routes import MODEL_ROUTES
from harness.serve.ollama.routes import OLLAMA_ROUTES
from harness.serve.other_formats import own_chat_fields, sent_name
from harness.serve.receipts.routes import RECEIPT_ROUTES
from harness.serve.rerank import RERANK_ROUTES
from harness.serve.responses.routes import RESPONSES_ROUTES
from harness.serve.route import Route
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


@cache
def _document(version: str) -> Json:
    """The OpenAPI document, made at the first request: making it takes a quarter of the server's
    start."""
    # Imported here, because it reads the types of all answers.
    from harness.serve.openapi import openapi_document

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


def tokenize(incoming: HttpRequest, body: TokenizeRequest) -> Json:
    """Answer ``POST /tokenize``."""
    model = incoming.model
    model.check_name(body.model)
    given = [one for one in (body.prompt, body.content, body.messages) if one is not None]
    if len(given) != 1:
        raise RequestError("prompt", "or messages is needed, and not both")
    if body.messages is not None:
        tokens = model.encode_chat(_rendered(model, body))
    else:
        text, field = body.prompt, "prompt"
        if text is None:
            text, field = body.content or "", "content"
        model.check_length(text, field)
        tokens = model.encode(
            text, parse_special=body.parse_special, add_special_tokens=adds_bos(body)
        )
    answer: Json = {
        "tokens": token_pieces(model.tokenizer, tokens) if body.with_pieces else tokens,
        "count": len(tokens),
        "max_model_len": model.context,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = list(map(model.tokenizer.token_text, tokens))
    return answer


def tokenizer_info(incoming: HttpRequest) -> Json:
    """The tokenizer's properties, for clients without the tokenizer."""
    model, tokenizer = incoming.model, incoming.model.tokenizer
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


def detokenize(incoming: HttpRequest, body: DetokenizeRequest) -> Json:
    """Answer ``POST /detokenize``."""
    incoming.model.check_name(body.model)
    vocab = incoming.model.model.config.vocab
    if any(not 0 <= token < vocab for token in body.tokens):
        raise RequestError("tokens", f"holds an id outside 0 to {vocab - 1}")
    raw = incoming.model.tokenizer.decode_bytes(body.tokens, special=True)
    text = raw.decode(errors="replace")
    return {"prompt": text, "content": text}


def apply_template(incoming: HttpRequest, body: TemplateRequest) -> Json:
    """Answer ``POST /apply-template``."""
    incoming.model.check_name(body.model)
    return {"prompt": _rendered(incoming.model, body).text}


def _rendered(model: ServedModel, body: TemplateFields) -> RenderedChat:
    """The prompt of a conversation, as chat completions would render it."""
    fields = given_fields(body, TemplateFields.__struct_fields__)
    return model.chat_plan(ChatRequest(**fields)).prompt


def health(incoming: HttpRequest) -> Json:
    """Whether the engine runs; without keys also how busy it is."""
    service, model = incoming.service, incoming.model
    driver = model.driver
    problem = driver.failure or driver.silence
    if problem is not None:
        raise ApiError(503, problem, code="engine_stopped", retry=False)
    status = "draining" if service.draining.is_set() else "ok"
    if service.accounts.keyed:
        return {"status": status}
    now = driver.statistics
    return {
        "status": status,
        "model": model.name,
        "active": now.running,
        "queued": now.waiting,
        "context": _context_facts(model, now),
        "memory": model.memory(),
        **({} if now.disk is None else {"disk_cache": asdict(now.disk)}),
    }


def ready(incoming: HttpRequest) -> Json:
    """Whether requests are taken."""
    service = incoming.service
    service.check_accepting()
    named = {} if service.accounts.keyed else {"model": incoming.model.name}
    return {"status": "ready", **named}


def version(incoming: HttpRequest) -> Json:
    """The server's version, and the function that the model computes."""
    return {"version": incoming.server.version, "fingerprint": incoming.model.fingerprint}


def metrics(incoming: HttpRequest) -> bytes:
    """Prometheus metrics of all tenants. Raises ApiError 403."""
    if not incoming.account.operator:
        raise ApiError(403, "metrics tell of all tenants; ask with an operator's key")
    return incoming.service.metrics.text()


def openapi(incoming: HttpRequest) -> Json:
    """The OpenAPI document."""
    return _document(incoming.server.version)


def adds_bos(body: TokenizeRequest) -> bool:
    """Whether a BOS goes in front of a text. Default: only of a text in vLLM's ``prompt``."""
    for given in (body.add_special_tokens, body.add_special):
        if given is not None:
            return given
    return body.content is None


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", Service.chat, "Answer a conversation.",
        ChatRequest, generates=True, prepare=own_chat_fields, sent_name=sent_name,
    ),
    Route(
        "POST", "/v1/completions", Service.complete, "Continue a text.",
        CompletionRequest, generates=True, prepare=own_chat_fields, sent_name=sent_name,
    ),
    *LLAMA_CPP_ROUTES,
    *EMBEDDING_ROUTES,
    *RERANK_ROUTES,
    *SCORE_ROUTES,
    *RESPONSES_ROUTES,
    *ANTHROPIC_ROUTES,
    *OLLAMA_ROUTES,
    *MODEL_ROUTES,
    Route(
        "POST", "/tokenize", tokenize, "Token ids of a text or chat.",
        TokenizeRequest, prepare=own_chat_fields,
    ),
    Route("POST", "/detokenize", detokenize, "Text of token ids.", DetokenizeRequest),
    Route("GET", "/tokenizer_info", tokenizer_info, "The model's tokenizer and template."),
    Route(
        "POST", "/apply-template", apply_template, "Prompt of a chat.",
        TemplateRequest, prepare=own_chat_fields,
    ),
    *TENANT_ROUTES,
    *RECEIPT_ROUTES,
    Route("GET", "/health", health, "Whether the server lives. Needs no key."),
    Route("GET", "/ready", ready, "Whether requests are taken. Needs no key."),
    Route("GET", "/version", version, "Version and fingerprint."),
    Route(
        "GET", "/metrics", metrics, "Prometheus metrics, for operators.",
        produces="text/plain; version=0.0.4",
    ),
    Route("GET", "/openapi.json", openapi, "This document."),
)  # fmt: skip
