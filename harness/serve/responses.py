"""``POST /v1/responses``, without stored state: a chat completion, told in another way.

Its events are named, as its clients expect of this route and of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
from flask import g

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.data_lines import DONE
from harness.serve.errors import ApiError
from harness.serve.gate import caller_of_request, decoded
from harness.serve.openapi import Route
from harness.serve.response_events import ResponseEvents, response_of
from harness.serve.service import Answered, Service
from harness.serve.wire import ChatRequest, decode
from harness.serve.wire_items import readable_items
from harness.serve.wire_responses import CHAT_NAMES, LOGPROBS, ResponsesRequest, chat_of

RESPONSES_ROUTES = (
    Route("POST", "/v1/responses", "respond", "Answer; nothing is stored.", ResponsesRequest),
)
DATA = b"data: "


class ResponsesHandlers:
    """One method for each of RESPONSES_ROUTES, named by it."""

    def respond(self, raw: bytes) -> Answered:
        g.generates = True
        body = decoded(raw, ResponsesRequest, readable_items)
        return respond(g.service, body, g.account.tenant, caller_of_request())


def respond(service: Service, body: ResponsesRequest, tenant: Tenant, caller: Caller) -> Answered:
    """The answer to a request, whole or streamed. Raises what ``Service.chat`` raises, with the
    fields named as they are here."""
    events = ResponseEvents(body)
    caller.ignored.extend(f"include ({name})" for name in body.include or () if name != LOGPROBS)

    def send_at_once(make: Callable[[], bytes]) -> bool:
        return caller.send_at_once(lambda: _events_of(events, make()))

    own = replace(caller, send_at_once=send_at_once, client_name=response_name)
    try:
        chat = decode(msgspec.json.encode(chat_of(body)), ChatRequest)
        answered = service.chat(chat, tenant, own)
    except ApiError as error:
        raise replace(error, param=error.param and response_name(error.param)) from None
    return response_of(body, answered) if isinstance(answered, dict) else _events(events, answered)


def _events(events: ResponseEvents, stream: Iterator[bytes]) -> Iterator[bytes]:
    """A chat completion's stream as events of this route; closing one closes the other."""
    try:
        for data in stream:
            yield _events_of(events, data)
    finally:
        stream.close()  # type: ignore[attr-defined]


def _events_of(events: ResponseEvents, data: bytes) -> bytes:
    """What a part of such a stream is told as."""
    told = []
    for line in filter(None, data.split(b"\n\n")):
        if not line.startswith(DATA):
            told.append(line + b"\n\n")
        elif line + b"\n\n" != DONE:
            chunk: Json = msgspec.json.decode(line.removeprefix(DATA))
            if "error" in chunk:
                told.append(events.failed(chunk["error"]))
            else:
                told.append(b"".join(events.chunk(chunk)))
    return b"".join(told)


def response_name(param: str) -> str:
    """What this route calls a field of chat completions."""
    name, dot, rest = param.partition(".")
    name, bracket, index = name.partition("[")
    return CHAT_NAMES.get(name, name) + bracket + index + dot + rest
