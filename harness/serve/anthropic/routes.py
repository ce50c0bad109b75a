"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.anthropic.parse import chat_of, names_in, readable_blocks
from harness.serve.anthropic.render import MessageShape, error_body
from harness.serve.anthropic.wire import CountRequest, MessagesRequest
from harness.serve.caller import Caller
from harness.serve.errors import naming_fields
from harness.serve.http_request import HttpRequest
from harness.serve.model import ServedModel
from harness.serve.route import Route
from harness.serve.service import Answered, Service


def count_message(incoming: HttpRequest, body: CountRequest) -> Json:
    """The number of tokens of a request. Raises ApiError and TemplateError."""
    model = incoming.model
    model.check_name(body.model)
    with naming_fields(names_in(body)):
        plan = model.chat_plan(chat_of(body, _can_disable_reasoning(model)))
    return {"input_tokens": len(model.encode_chat(plan.prompt, plan.spoken))}


def message(service: Service, body: MessagesRequest, tenant: Tenant, caller: Caller) -> Answered:
    """Answer a request, whole or streamed. Raises what ``Service.chat`` raises."""
    names = names_in(body)
    with naming_fields(names):
        chat = chat_of(body, _can_disable_reasoning(service.model))
        named = caller.naming(names)
        return service.chat(chat, tenant, named, MessageShape, "msg_")


def _can_disable_reasoning(model: ServedModel) -> bool:
    template = model.template
    return template is not None and template.has_thinking_toggle


_route = partial(Route, errors=error_body, error_schema="AnthropicError")
ANTHROPIC_ROUTES = (
    _route(
        "POST", "/v1/messages", message, "Answer, as Anthropic's API does.",
        MessagesRequest, generates=True, prepare=readable_blocks,
    ),
    _route(
        "POST", "/v1/messages/count_tokens", count_message, "Tokens of such a request.",
        CountRequest, prepare=readable_blocks,
    ),
)  # fmt: skip
