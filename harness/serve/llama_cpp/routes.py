"""llama.cpp's own routes: completion, infill, slots, adapters and properties."""

from __future__ import annotations

import time
from functools import partial

from contract.errors import RequestError
from contract.types import Tenant
from harness.console import text_of_name
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.errors import ApiError, try_again
from harness.serve.http_request import HttpRequest
from harness.serve.llama_cpp.parse import client_name, completion_of, infill_of
from harness.serve.llama_cpp.render import MILLISECONDS, LlamaShape
from harness.serve.llama_cpp.wire import InfillRequest, LlamaCompletionRequest, SlotFile
from harness.serve.route import Route
from harness.serve.service import Answered, Service
from harness.serve.wire import LoraScale

ACTIONS = ("save", "restore", "erase")


def props(incoming: HttpRequest) -> Json:
    """The settings of the model that answers."""
    model = incoming.model
    tokenizer = model.tokenizer
    tokens = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    return {
        "default_generation_settings": {"n_ctx": model.context, "params": model.sampling.values},
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


def adapters(incoming: HttpRequest) -> list[Json]:
    """The adapters and their default scales."""
    served = incoming.model.adapters
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


def set_adapters(incoming: HttpRequest, body: list[LoraScale]) -> Json:
    """Set the default scales of the adapters. Raises RequestError."""
    served = incoming.model.adapters
    served.defaults = served.chosen(None, body)
    return {"success": True}


def slots(incoming: HttpRequest) -> list[Json]:
    """The tenant's slots. Raises ApiError."""
    model = incoming.model
    facts = incoming.service.slots.facts(model, incoming.account.tenant)
    if incoming.query.get("fail_on_no_slot") and all(busy for busy, _ in facts):
        raise try_again("no slot is idle", "no_slot", 1)
    speculative = model.driver.statistics.speculation.drafted > 0
    return [
        {
            "id": number,
            "n_ctx": model.context,
            "speculative": speculative,
            "is_processing": busy,
            "n_tokens": tokens,
        }
        for number, (busy, tokens) in enumerate(facts)
    ]


def change_slot(incoming: HttpRequest, body: SlotFile, slot: str) -> Json:
    """Save, restore or erase a slot. Raises ApiError, RequestError and StorageProblem."""
    action = incoming.query.get("action")
    if action not in ACTIONS:
        raise ApiError(400, f"action is one of {', '.join(ACTIONS)}", param="action")
    tenant, began = incoming.account.tenant, time.monotonic()
    model, table = incoming.model, incoming.service.slots
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


def continue_text(
    service: Service, body: LlamaCompletionRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer ``POST /completion``. Raises what ``Service.complete`` raises."""
    service.model.check_name(body.model)
    meant = completion_of(service.model, body)
    return service.complete(meant, tenant, caller, partial(LlamaShape, body), "llama-")


def infill(service: Service, body: InfillRequest, tenant: Tenant, caller: Caller) -> Answered:
    """Answer ``POST /infill``. Raises what ``Service.complete`` raises."""
    service.model.check_name(body.model)
    meant = infill_of(service.model, body)
    return service.complete(meant, tenant, caller, partial(LlamaShape, body), "llama-")


LLAMA_CPP_ROUTES = (
    Route(
        "POST", "/completion", continue_text, "Continue a text.",
        LlamaCompletionRequest, generates=True, client_name=client_name,
    ),
    Route(
        "POST", "/infill", infill, "The text between two others.",
        InfillRequest, generates=True, client_name=client_name,
    ),
    Route("GET", "/props", props, "The settings of the model that answers."),
    Route("GET", "/lora-adapters", adapters, "The LoRA adapters and their scales."),
    Route(
        "POST", "/lora-adapters", set_adapters,
        "The adapters of requests that name none. For admins.", list[LoraScale], admin=True,
    ),
    Route("GET", "/slots", slots, "One's slots, and whether they answer."),
    Route(
        "POST", "/slots/<slot>", change_slot, "Save, restore or erase a slot.", SlotFile,
        may_be_empty=True,
    ),
)  # fmt: skip
