"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace

from flask import g

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.anthropic.errors import error_body
from harness.serve.anthropic.parse import chat_of, client_name, readable_blocks
from harness.serve.anthropic.render import MessageShape
from harness.serve.anthropic.wire import CountRequest, MessagesRequest
from harness.serve.caller import Caller
from harness.serve.errors import naming_fields
from harness.serve.gate import caller_of_request, decoded
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service

ANTHROPIC_ROUTES = (
    Route(
        "POST", "/v1/messages", "message", "Answer, as Anthropic's API does.",
        MessagesRequest, errors=error_body, error_schema="AnthropicError",
    ),
    Route(
        "POST", "/v1/messages/count_tokens", "count_message", "Tokens of such a request.",
        CountRequest, errors=error_body, error_schema="AnthropicError",
    ),
)  # fmt: skip


class AnthropicHandlers:
    """One method for each of ANTHROPIC_ROUTES, named by it."""

    def message(self, raw: bytes) -> Answered:
        g.generates = True
        caller = replace(caller_of_request(), client_name=client_name)
        body = decoded(raw, MessagesRequest, readable_blocks)
        return answer_message(g.service, body, g.account.tenant, caller)

    def count_message(self, raw: bytes) -> Json:
        body = decoded(raw, CountRequest, readable_blocks)
        service: Service = g.service
        service.model.check_name(body.model)
        with naming_fields(client_name):
            plan = service.model.chat_plan(chat_of(body, _switches_thoughts(service)))
        return {"input_tokens": len(service.model.encode_chat(plan.prompt, plan.spoken))}


def answer_message(
    service: Service, body: MessagesRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """The answer to a request, whole or streamed. Raises what ``Service.chat`` raises, with the
    fields named as they are here."""
    with naming_fields(client_name):
        chat = chat_of(body, _switches_thoughts(service))
        return service.chat(chat, tenant, caller, MessageShape, "msg_")


def _switches_thoughts(service: Service) -> bool:
    template = service.model.template
    return template is not None and template.has_thinking_toggle
