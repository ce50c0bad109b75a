"""llama.cpp's own routes: a text continued, the text between two others, and the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from flask import g

from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.gate import caller_of_request, decoded, need_admin
from harness.serve.llama_cpp.parse import client_name, completion_of, infill_of
from harness.serve.llama_cpp.render import shape_of
from harness.serve.llama_cpp.wire import InfillRequest, LlamaCompletionRequest
from harness.serve.model import ServedModel
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service
from harness.serve.wire import CompletionRequest, LoraScale, decode

Body = TypeVar("Body", LlamaCompletionRequest, InfillRequest)
LLAMA_CPP_ROUTES = (
    Route("POST", "/completion", "continue_text", "Continue a text.", LlamaCompletionRequest),
    Route("POST", "/infill", "infill", "The text between two others.", InfillRequest),
    Route("GET", "/props", "props", "The settings of the model that answers."),
    Route("GET", "/lora-adapters", "adapters", "The LoRA adapters and their scales."),
    Route(
        "POST", "/lora-adapters", "set_adapters",
        "The adapters of requests that name none. For admins.", list[LoraScale],
    ),
)  # fmt: skip


class LlamaCppHandlers:
    """One method for each of LLAMA_CPP_ROUTES, named by it."""

    def continue_text(self, raw: bytes) -> Answered:
        return _answer(raw, LlamaCompletionRequest, completion_of)

    def infill(self, raw: bytes) -> Answered:
        return _answer(raw, InfillRequest, infill_of)

    def props(self) -> Json:
        model = _service().model
        tokenizer = model.tokenizer
        tokens = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        return {
            "default_generation_settings": {
                "n_ctx": model.context,
                "params": model.sampling.values,
            },
            "total_slots": model.driver.statistics.slots,
            "model_alias": model.name,
            "model_path": model.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "" if model.template is None else model.template.text,
            **{
                f"{name}_token": "" if token is None else tokenizer.token_text(token)
                for name, token in tokens.items()
            },
            "build_info": model.fingerprint,
        }

    def adapters(self) -> list[Json]:
        served = _service().model.adapters
        scales = dict(served.defaults)
        return [
            {"id": n, "name": one.name, "path": one.path.name, "scale": scales.get(n, 0.0)}
            for n, one in enumerate(served.named)
        ]

    def set_adapters(self, raw: bytes) -> Json:
        need_admin()
        served = _service().model.adapters
        kind: Any = list[LoraScale]
        served.defaults = served.chosen(None, decode(raw, kind))
        return {"success": True}


def _service() -> Service:
    service: Service = g.service
    return service


def _answer(
    raw: bytes, kind: type[Body], mean: Callable[[ServedModel, Body], CompletionRequest]
) -> Answered:
    g.generates = True
    body, service = decoded(raw, kind), _service()
    caller = replace(caller_of_request(), client_name=client_name)
    try:
        service.model.check_name(body.model)
        meant = mean(service.model, body)
        return service.complete(meant, g.account.tenant, caller, shape_of(body), "llama-")
    except ApiError as error:
        raise replace(error, param=error.param and client_name(error.param)) from None
