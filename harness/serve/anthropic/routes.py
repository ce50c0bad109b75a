"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.anthropic.parse import chat_of, names_in, readable_blocks
from harness.serve.anthropic.render import MessageShape, error_body
from harness.serve.anthropic.wire import CountRequest, MessagesRequest
from harness.serve.caller import Caller
from harness.serve.errors import naming_fields
from harness.serve.gate import decoded, service_of_request
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service


class AnthropicHandlers:
    """Handlers of the ANTHROPIC_ROUTES that have no ``answer``, by their names."""

    def count_message(self, raw: bytes) -> Json:
        body = decoded(raw, CountRequest, readable_blocks)
        service = service_of_request()
        service.model.check_name(body.model)
        with naming_fields(names_in(body)):
            plan = service.model.chat_plan(chat_of(body, _can_disable_reasoning(service)))
        return {"input_tokens": len(service.model.encode_chat(plan.prompt, plan.spoken))}


def answer_message(
    service: Service, body: MessagesRequest, tenant: Tenant, caller: Caller
) -> Answered:
    """Answer a request, whole or streamed. Raises what ``Service.chat`` raises."""
    names = names_in(body)
    with naming_fields(names):
        chat = chat_of(body, _can_disable_reasoning(service))
        named = replace(caller, client_name=names)
        return service.chat(chat, tenant, named, MessageShape, "msg_")


def _can_disable_reasoning(service: Service) -> bool:
    template = service.model.template
    return template is not None and template.has_thinking_toggle


_route = partial(Route, errors=error_body, error_schema="AnthropicError")
ANTHROPIC_ROUTES = (
    _route(
        "POST", "/v1/messages", "message", "Answer, as Anthropic's API does.",
        MessagesRequest, answer=answer_message, prepare=readable_blocks,
    ),
    _route(
        "POST", "/v1/messages/count_tokens", "count_message", "Tokens of such a request.",
        CountRequest,
    ),
)  # fmt: skip
