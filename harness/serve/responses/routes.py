"""The routes below ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from flask import g, request

from contract.types import Tenant
from harness.serve.answers import Answer, Json
from harness.serve.caller import Caller
from harness.serve.errors import ApiError, naming_fields
from harness.serve.gate import caller_of_request, decoded
from harness.serve.openapi import Route
from harness.serve.responses.errors import response_name
from harness.serve.responses.parse import chat_of, items_of, readable_items
from harness.serve.responses.render import ResponseShape
from harness.serve.responses.store import ResponseStore, StoredResponse, named
from harness.serve.responses.wire import LOGPROBS, InputItem, ResponsesRequest
from harness.serve.service import Answered, Service
from harness.serve.wire import ChatRequest, converted

RESPONSES_ROUTES = (
    Route("POST", "/v1/responses", "respond", "Answer, and store it.", ResponsesRequest),
    Route(
        "POST", "/v1/responses/input_tokens", "count_response", "Tokens of such a request.",
        ResponsesRequest,
    ),
    Route("GET", "/v1/responses/<id>", "response", "A stored answer."),
    Route("DELETE", "/v1/responses/<id>", "remove_response", "Forget a stored answer."),
    Route("POST", "/v1/responses/<id>/cancel", "cancel_response", "Refused: none runs unattended."),
    Route("GET", "/v1/responses/<id>/input_items", "response_items", "What it was asked with."),
)  # fmt: skip
MOST_ITEMS, USUAL_ITEMS = 100, 20
"""Items of a list: most of them, and how many unless a request says."""


class ResponsesHandlers:
    """One method for each of RESPONSES_ROUTES, named by it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def respond(self, raw: bytes) -> Answered:
        g.generates = True
        body = decoded(raw, ResponsesRequest, readable_items)
        return respond(g.service, body, g.account.tenant, caller_of_request(), self._store)

    def count_response(self, raw: bytes) -> Json:
        body = decoded(raw, ResponsesRequest, readable_items)
        service: Service = g.service
        service.model.check_name(body.model)
        earlier = self._store.conversation(g.account.tenant.id, body.previous_response_id)
        with naming_fields(response_name):
            plan = service.model.chat_plan(converted(chat_of(body, earlier), ChatRequest))
        count = len(service.model.encode_chat(plan.prompt, plan.spoken))
        return {"object": "response.input_tokens", "input_tokens": count}

    def response(self, id: str) -> Json:
        if request.args.get("stream", "false") != "false":
            problem = "a stored answer is given whole"
            raise ApiError(400, problem, param="stream", code="unsupported")
        return self._stored(id).response

    def remove_response(self, id: str) -> Json:
        self._store.delete(g.account.tenant.id, id)
        return {"id": id, "object": "response", "deleted": True}

    def cancel_response(self, id: str) -> Json:
        self._stored(id)
        problem = f"response {id!r} has ended; an answer under way ends when its client leaves"
        raise ApiError(400, problem, code="not_cancellable", retry=False)

    def response_items(self, id: str) -> Json:
        stored = self._stored(id)
        earlier = self._store.conversation(g.account.tenant.id, stored.previous)
        return _page_of([*earlier, *stored.items])

    def _stored(self, id: str) -> StoredResponse:
        return self._store.get(g.account.tenant.id, id)


def respond(
    service: Service,
    body: ResponsesRequest,
    tenant: Tenant,
    caller: Caller,
    store: ResponseStore | None = None,
) -> Answered:
    """The answer to a request, whole or streamed; it is stored in ``store`` before its end is sent.
    Raises what ``Service.chat`` raises, with the fields named as they are here, and ApiError 404
    where the conversation is not stored."""
    store = ResponseStore() if store is None else store
    earlier = store.conversation(tenant.id, body.previous_response_id)
    caller.ignored.extend(f"include ({name})" for name in body.include or () if name != LOGPROBS)
    own = replace(caller, client_name=response_name)
    keep = partial(_keep, store, tenant, body) if body.store is not False else None

    def shape_of(answer: Answer, listed: bool) -> ResponseShape:
        return ResponseShape(body, answer, listed, keep)

    with naming_fields(response_name):
        chat = converted(chat_of(body, earlier), ChatRequest)
        return service.chat(chat, tenant, own, shape_of, "resp_")


def _keep(
    store: ResponseStore,
    tenant: Tenant,
    body: ResponsesRequest,
    response: Json,
    token_ids: Sequence[int],
) -> None:
    """Store an answer that was made of these tokens."""
    said = [msgspec.convert(item, InputItem) for item in response["output"]]
    if said:
        said[-1] = msgspec.structs.replace(said[-1], token_ids=list(token_ids))
    items = named(items_of(body))
    store.put(tenant.id, StoredResponse(response, items, tuple(said), body.previous_response_id))


def _page_of(items: Sequence[InputItem]) -> Json:
    """The part of a list of items that the request at hand asks for. Raises ApiError."""
    arguments = request.args
    order, limit = arguments.get("order", "desc"), arguments.get("limit", str(USUAL_ITEMS))
    if order not in ("asc", "desc"):
        raise ApiError(400, "order is asc or desc", param="order", code="invalid_value")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MOST_ITEMS:
        raise ApiError(400, f"limit is 1 to {MOST_ITEMS}", param="limit", code="invalid_value")
    listed: list[Json] = [msgspec.to_builtins(item) for item in items]
    for item in listed:
        item.pop("token_ids", None)
        item.setdefault("type", "message")
        if isinstance(item.get("content"), str):
            item["content"] = [{"type": "input_text", "text": item["content"]}]
    if order == "desc":
        listed.reverse()
    after = arguments.get("after")
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise ApiError(400, "after names no item", param="after", code="invalid_value")
        listed = listed[ids.index(after) + 1 :]
    page = listed[: int(limit)]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(page) < len(listed)
    return {
        "object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": more,
    }  # fmt: skip
