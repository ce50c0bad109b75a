"""llama.cpp's own routes: completion, infill, slots, adapters and properties."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from flask import g, request

from contract.errors import RequestError
from contract.types import Tenant
from harness.console import text_of_name
from harness.serve.answers import Json
from harness.serve.caller import Caller, in_names_of
from harness.serve.data_lines import encode
from harness.serve.errors import ApiError, try_again
from harness.serve.gate import decoded, need_admin, service_of_request
from harness.serve.llama_cpp.parse import client_name, completion_of, infill_of
from harness.serve.llama_cpp.render import MILLISECONDS, LlamaShape
from harness.serve.llama_cpp.wire import InfillRequest, LlamaCompletionRequest, SlotFile
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service
from harness.serve.wire import LoraScale, decode

ACTIONS = ("save", "restore", "erase")


class LlamaCppHandlers:
    """Handlers of the LLAMA_CPP_ROUTES that have no ``answer``, by their names."""

    def props(self) -> Json:
        model = service_of_request().model
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
        served = service_of_request().model.adapters
        scales = dict(served.defaults)
        return [
            {
                "id": n,
                "name": one.name,
                "path": text_of_name(one.path.name),
                "scale": scales.get(n, 0.0),
            }
            for n, one in enumerate(served.named)
        ]

    def set_adapters(self, raw: bytes) -> Json:
        need_admin()
        served = service_of_request().model.adapters
        kind: Any = list[LoraScale]
        served.defaults = served.chosen(None, decode(raw, kind))
        return {"success": True}

    def slots(self) -> bytes:
        service = service_of_request()
        model, facts = service.model, service.slots.facts(service.model, g.account.tenant)
        if request.args.get("fail_on_no_slot") and all(busy for busy, _ in facts):
            raise try_again("no slot is idle", "no_slot", 1)
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
        service, tenant, began = service_of_request(), g.account.tenant, time.monotonic()
        model, table = service.model, service.slots
        model.check_name(body.model)
        number = int(slot) if slot.isascii() and slot.isdecimal() and len(slot) < 10 else None
        found = table.of(model, tenant, number, slot[:32])
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


@in_names_of(client_name)
def continue_text(
    service: Service, body: LlamaCompletionRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer ``POST /completion``. Raises what ``Service.complete`` raises."""
    service.model.check_name(body.model)
    meant = completion_of(service.model, body)
    return service.complete(meant, tenant, caller, partial(LlamaShape, body), "llama-")


@in_names_of(client_name)
def infill(service: Service, body: InfillRequest, tenant: Tenant, caller: Caller) -> Answered:
    """Answer ``POST /infill``. Raises what ``Service.complete`` raises."""
    service.model.check_name(body.model)
    meant = infill_of(service.model, body)
    return service.complete(meant, tenant, caller, partial(LlamaShape, body), "llama-")


LLAMA_CPP_ROUTES = (
    Route(
        "POST", "/completion", "continue_text", "Continue a text.",
        LlamaCompletionRequest, answer=continue_text,
    ),
    Route(
        "POST", "/infill", "infill", "The text between two others.",
        InfillRequest, answer=infill,
    ),
    Route("GET", "/props", "props", "The settings of the model that answers."),
    Route("GET", "/lora-adapters", "adapters", "The LoRA adapters and their scales."),
    Route(
        "POST", "/lora-adapters", "set_adapters",
        "The adapters of requests that name none. For admins.", list[LoraScale],
    ),
    Route("GET", "/slots", "slots", "One's slots, and whether they answer."),
    Route("POST", "/slots/<slot>", "change_slot", "Save, restore or erase a slot.", SlotFile),
)  # fmt: skip
