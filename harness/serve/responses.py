"""``POST /v1/responses``, without stored state: a chat completion, told in another way.

Its events are named, as its clients expect of this route and of no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
from flask import g

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.gate import client_gone
from harness.serve.openapi import Route
from harness.serve.response_events import ResponseEvents, response_of
from harness.serve.service import Answered, Service
from harness.serve.streams import DONE, PING, Gone
from harness.serve.wire import ChatRequest, decode
from harness.serve.wire_responses import CHAT_NAMES, ResponsesRequest, chat_of

RESPONSES_ROUTES = (
    Route("POST", "/v1/responses", "respond", "Answer; nothing is stored.", ResponsesRequest),
)
DATA = b"data: "


class ResponsesHandlers:
    """One method for each of RESPONSES_ROUTES, named by it."""

    def respond(self, raw: bytes) -> Answered:
        g.generates = True
        body = decode(raw, ResponsesRequest)
        return respond(g.service, body, g.account.tenant, client_gone())


def respond(service: Service, body: ResponsesRequest, tenant: Tenant, gone: Gone) -> Answered:
    """The answer to a request, whole or streamed. Raises what ``Service.chat`` raises, with the
    fields named as they are here."""
    try:
        chat = decode(msgspec.json.encode(chat_of(body)), ChatRequest)
        answered = service.chat(chat, tenant, gone)
    except ApiError as error:
        raise _renamed(error) from None
    return response_of(body, answered) if isinstance(answered, dict) else _events(body, answered)


def _events(body: ResponsesRequest, stream: Iterator[bytes]) -> Iterator[bytes]:
    """A chat completion's stream as events of this route; closing one closes the other."""
    events = ResponseEvents(body)
    try:
        for data in stream:
            for line in filter(None, data.split(b"\n\n")):
                if not line.startswith(DATA):
                    yield PING
                elif line + b"\n\n" != DONE:
                    chunk: Json = msgspec.json.decode(line.removeprefix(DATA))
                    if "error" in chunk:
                        yield events.failed(chunk["error"])
                    else:
                        yield b"".join(events.chunk(chunk)) or PING
    finally:
        stream.close()  # type: ignore[attr-defined]


def _renamed(error: ApiError) -> ApiError:
    name, dot, rest = (error.param or "").partition(".")
    name, bracket, index = name.partition("[")
    if name not in CHAT_NAMES:
        return error
    return replace(error, param=CHAT_NAMES[name] + bracket + index + dot + rest)
