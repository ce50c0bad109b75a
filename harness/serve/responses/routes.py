"""The routes below ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.errors import ApiError, invalid_value, naming_fields, unsupported
from harness.serve.http_request import HttpRequest
from harness.serve.responses.errors import item_not_found, response_name
from harness.serve.responses.parse import (
    chat_of,
    items_of,
    readable_items,
    references_of,
    with_references,
)
from harness.serve.responses.render import ResponseShape
from harness.serve.responses.store import ResponseStore, StoredResponse, named
from harness.serve.responses.wire import LOGPROBS, InputItem, ResponsesRequest
from harness.serve.route import Route
from harness.serve.service import Answered, Service
from harness.serve.strict_json import known_type
from harness.serve.wire import ChatRequest, converted

MAX_ITEMS, USUAL_ITEMS = 100, 20
"""Most items of a list, and the default."""


def count_response(incoming: HttpRequest, body: ResponsesRequest) -> Json:
    """The number of tokens of a request. Raises as ``respond`` does."""
    service, tenant = incoming.service, incoming.account.tenant
    service.model.check_name(body.model)
    body = _with_stored_items(service.responses, tenant, body)
    earlier = service.responses.conversation(tenant, body.previous_response_id)
    with naming_fields(response_name):
        plan = service.model.chat_plan(converted(chat_of(body, earlier), ChatRequest))
        count = len(service.model.encode_chat(plan.prompt, plan.spoken))
    return {"object": "response.input_tokens", "input_tokens": count}


def response(incoming: HttpRequest, id: str) -> Json:
    """A stored answer. Raises ApiError and StorageProblem, as do the functions below."""
    stored = _stored(incoming, id)
    if incoming.query.get("stream", "false") != "false":
        raise unsupported("stream", "a stored answer is given whole")
    return stored.response


def remove_response(incoming: HttpRequest, id: str) -> Json:
    """Delete a stored answer."""
    incoming.service.responses.delete(incoming.account.tenant, id)
    return {"id": id, "object": "response", "deleted": True}


def cancel_response(incoming: HttpRequest, id: str) -> Json:
    """Refuse: a stored answer has ended."""
    _stored(incoming, id)
    problem = f"response {id!r} has ended; an answer under way ends when its client leaves"
    raise ApiError(400, problem, code="not_cancellable", retry=False)


def response_items(incoming: HttpRequest, id: str) -> Json:
    """The items of the conversation that a stored answer continues."""
    stored = _stored(incoming, id)
    earlier = incoming.service.responses.conversation(incoming.account.tenant, stored.previous)
    return _page_of([*earlier, *stored.items], incoming.query)


def _stored(incoming: HttpRequest, id: str) -> StoredResponse:
    return incoming.service.responses.get(incoming.account.tenant, id)


def respond(service: Service, body: ResponsesRequest, tenant: Tenant, caller: Caller) -> Answered:
    """Answer a request, whole or streamed. The answer is stored before its end is sent. Raises what
    ``Service.chat`` raises, ApiError 404 for a missing conversation or item, and StorageProblem if
    the answer cannot be stored."""
    body = _with_stored_items(service.responses, tenant, body)
    earlier = service.responses.conversation(tenant, body.previous_response_id)
    if body.store is not False:
        service.responses.check()
    caller.ignored.extend(f"include ({name})" for name in body.include or () if name != LOGPROBS)
    keep = partial(_keep, service.responses, tenant, body) if body.store is not False else None
    shape_of = partial(ResponseShape, body, keep=keep)
    chat = converted(chat_of(body, earlier), ChatRequest)
    return service.chat(chat, tenant, caller, shape_of, "resp_")


def _with_stored_items(
    store: ResponseStore, tenant: Tenant, body: ResponsesRequest
) -> ResponsesRequest:
    """``body`` with the stored items that it refers to. Raises ApiError and StorageProblem."""
    fields = references_of(body)
    if not fields:
        return body
    stored = store.items(tenant, fields.keys())
    for id, field in fields.items():
        if id not in stored:
            raise item_not_found(id, field)
    return with_references(body, stored)


def _keep(
    store: ResponseStore,
    tenant: Tenant,
    body: ResponsesRequest,
    response: Json,
    token_ids: Sequence[int],
) -> None:
    """Store an answer that has these tokens."""
    output = [msgspec.convert(item, known_type(InputItem)) for item in response["output"]]
    if output:
        output[-1] = msgspec.structs.replace(output[-1], token_ids=list(token_ids))
    items = named(items_of(body))
    store.put(tenant, StoredResponse(response, items, tuple(output), body.previous_response_id))


def _page_of(items: Sequence[InputItem], arguments: Mapping[str, str]) -> Json:
    """The page of a list of items that the arguments of a request ask for. Raises ApiError."""
    order, limit = arguments.get("order", "desc"), arguments.get("limit", str(USUAL_ITEMS))
    if order not in ("asc", "desc"):
        raise invalid_value("order", "order is asc or desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_ITEMS:
        raise invalid_value("limit", f"limit is 1 to {MAX_ITEMS}")
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
            raise invalid_value("after", "after names no item")
        listed = listed[ids.index(after) + 1 :]
    page = listed[: int(limit)]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(page) < len(listed)
    return {
        "object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": more,
    }  # fmt: skip


RESPONSES_ROUTES = (
    Route(
        "POST", "/v1/responses", respond, "Answer, and store it.",
        ResponsesRequest, generates=True, prepare=readable_items, client_name=response_name,
    ),
    Route(
        "POST", "/v1/responses/input_tokens", count_response, "Tokens of such a request.",
        ResponsesRequest, prepare=readable_items,
    ),
    Route("GET", "/v1/responses/<id>", response, "A stored answer."),
    Route("DELETE", "/v1/responses/<id>", remove_response, "Forget a stored answer."),
    Route("POST", "/v1/responses/<id>/cancel", cancel_response, "Refused: none runs unattended."),
    Route("GET", "/v1/responses/<id>/input_items", response_items, "What it was asked with."),
)  # fmt: skip
