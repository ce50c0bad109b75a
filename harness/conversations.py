"""Plans answers, with tools and formats, by the server's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from contract.errors import RequestError
from contract.types import Request
from harness.extras import optional_libraries
from harness.host.dialect import Dialect
from harness.host.structured.grammars import Grammars, TokenMasks
from harness.host.template_dialect import tried_dialect
from reference.model.chat_template import ChatTemplate
from reference.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from harness.serve.answer_grammar import Constrained, TextPlan
    from harness.serve.chat import ChatPlan


class Conversations:
    """Plans the chat answers of one model. ``name`` is the model's name."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, grammars: Grammars, name: str
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._name = name

    @cached_property
    def dialect(self) -> Dialect:
        """The syntax in which the model writes reasoning and tool calls."""
        return tried_dialect(self._template, self._tokenizer)

    def plan(self, messages: Sequence[Mapping[str, object]], fields: Mapping[str, Any]) -> ChatPlan:
        """Plan the answer to a conversation. ``fields`` are further fields of a
        ``/v1/chat/completions`` body. Raises RequestError, TemplateError, and ConfigError if the
        extra is not installed."""
        with _refusals_as_errors():
            from harness.serve.chat import plan_chat
            from harness.serve.wire import ChatRequest, converted

            body = {name: value for name, value in fields.items() if value is not None}
            request = converted({**body, "messages": [dict(one) for one in messages]}, ChatRequest)
            return plan_chat(request, self._template, self.dialect, self._name)

    def masks(self, plan: ChatPlan, requests: Sequence[Request]) -> dict[int, TokenMasks]:
        """The token masks of each request; empty without a grammar. Raises RequestError."""
        return token_masks(plan, self._grammars, requests)


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request in any dialect that name a format, as this server's. Raises RequestError,
    and ConfigError if the extra is not installed."""
    with _refusals_as_errors():
        from harness.serve.other_formats import own_format

        return own_format(dict(fields))


def text_plan(fields: Mapping[str, Any]) -> TextPlan:
    """Plan the continuation of a text. ``fields`` are those of a ``/v1/completions`` body that name
    a format. Raises RequestError, and ConfigError if the extra is not installed."""
    with _refusals_as_errors():
        from harness.serve.answer_grammar import TextPlan
        from harness.serve.wire import CompletionRequest, converted

        return TextPlan.of(converted({**fields, "prompt": ""}, CompletionRequest))


def token_masks(
    plan: Constrained, grammars: Grammars, requests: Sequence[Request]
) -> dict[int, TokenMasks]:
    """The token masks of each request; empty without a grammar. Raises RequestError."""
    with _refusals_as_errors():
        from harness.serve.answer_grammar import masks_of

        return masks_of(plan, grammars, requests)


def fields_of(
    thinking: bool | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None,
    response_format: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments of a chat call as fields of a ``/v1/chat/completions`` body."""
    fields = {
        "enable_thinking": thinking,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
        "response_format": response_format,
    }
    return {name: value for name, value in fields.items() if value is not None}


@contextmanager
def _refusals_as_errors() -> Iterator[None]:
    """Turn the server's ApiError into RequestError."""
    with optional_libraries("tools and formats: "):
        from harness.serve.errors import IN_FORMAT, ApiError

        try:
            yield
        except ApiError as error:
            param = error.param or "messages"
            problem = error.message.removeprefix(param).removeprefix(IN_FORMAT).lstrip(": ")
            raise RequestError(param, problem) from None
