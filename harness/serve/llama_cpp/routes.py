"""llama.cpp's own routes: a text continued, the text between two others, and the settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from flask import g, request

from contract.errors import RequestError
from harness.serve.answers import Json
from harness.serve.data_lines import encode
from harness.serve.errors import ApiError, naming_fields
from harness.serve.gate import caller_of_request, decoded, need_admin
from harness.serve.llama_cpp.parse import client_name, completion_of, infill_of
from harness.serve.llama_cpp.render import MILLISECONDS, shape_of
from harness.serve.llama_cpp.wire import InfillRequest, LlamaCompletionRequest, SlotFile
from harness.serve.model import ServedModel
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service
from harness.serve.wire import CompletionRequest, LoraScale, decode

ACTIONS = ("save", "restore", "erase")
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
    Route("GET", "/slots", "slots", "One's slots, and whether they answer."),
    Route("POST", "/slots/<slot>", "change_slot", "Save, restore or erase a slot.", SlotFile),
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

    def slots(self) -> bytes:
        service = _service()
        model, facts = service.model, service.slots.facts(service.model, g.account.tenant)
        if request.args.get("fail_on_no_slot") and all(busy for busy, _ in facts):
            raise ApiError(503, "no slot is idle", code="no_slot", retry_after=1, retry=True)
        speculative = model.driver.statistics.speculation.drafted > 0
        return encode(
            [
                {
                    "id": number,
                    "n_ctx": model.context,
                    "speculative": speculative,
                    "is_processing": busy,
                    "n_tokens": tokens,
                }
                for number, (busy, tokens) in enumerate(facts)
            ]
        )

    def change_slot(self, slot: str, raw: bytes) -> Json:
        body, action = decoded(raw or b"{}", SlotFile), request.args.get("action")
        if action not in ACTIONS:
            raise ApiError(400, f"action is one of {', '.join(ACTIONS)}", param="action")
        service, tenant, began = _service(), g.account.tenant, time.monotonic()
        model, table = service.model, service.slots
        model.check_name(body.model)
        number = int(slot) if slot.isascii() and slot.isdecimal() and len(slot) < 10 else -1
        found = table.of(model, tenant, number)
        if action == "erase":
            return {"id_slot": number, "n_erased": table.erase(model, tenant, found)}
        if body.filename is None:
            raise RequestError("filename", f"is needed to {action} a slot")
        do = table.save if action == "save" else table.restore
        tokens, nbytes = do(model, tenant, found, body.filename)
        done, moved = ("saved", "written") if action == "save" else ("restored", "read")
        return {
            "id_slot": number,
            "filename": body.filename,
            f"n_{done}": tokens,
            f"n_{moved}": nbytes,
            "timings": {f"{action}_ms": (time.monotonic() - began) * MILLISECONDS},
        }


def _service() -> Service:
    service: Service = g.service
    return service


def _answer(
    raw: bytes, kind: type[Body], mean: Callable[[ServedModel, Body], CompletionRequest]
) -> Answered:
    g.generates = True
    body, service = decoded(raw, kind), _service()
    caller = replace(caller_of_request(), client_name=client_name)
    with naming_fields(client_name):
        service.model.check_name(body.model)
        meant = mean(service.model, body)
        return service.complete(meant, g.account.tenant, caller, shape_of(body), "llama-")
