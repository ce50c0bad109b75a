"""From a chat request to what the engine is asked: a prompt, a grammar, the form of the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.types import Request
from harness.serve.dialect import Dialect
from harness.serve.dialect.calls import ANY_OBJECT, Function, json_rule
from harness.serve.errors import ApiError
from harness.serve.generic_tools import enforced_functions, generic_dialect, written_as_text
from harness.serve.reply import ReplyForm, ReplyParser
from harness.serve.strict_json import BadJson, loads
from harness.serve.structured.grammars import (
    GrammarBroke,
    GrammarRefused,
    Grammars,
    GrammarsBusy,
    TokenMasks,
    regex_rule,
)
from harness.serve.structured.schema_tree import SchemaRefused
from harness.serve.wire import AssistantMessage, ChatRequest, Message, ToolMessage
from harness.serve.wire_tools import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    RegexFormat,
    ResponseFormat,
    TextFormat,
    Tool,
    ToolCall,
)
from reference.model.chat_template import ChatTemplate, RenderedChat

NO_EFFORT = ("none", "minimal")
Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A rendered conversation, the ``grammar`` of its answer if it has one, its form, the fields of
    the request that changed nothing, and the tokens of earlier answers as the request names
    them."""

    prompt: RenderedChat
    grammar: str | None
    form: ReplyForm
    ignored: tuple[str, ...] = ()
    spoken: tuple[tuple[int, ...], ...] = ()

    @property
    def grammar_param(self) -> str:
        """The field of a request that its grammar comes from."""
        return "tools" if self.form.functions else "response_format"

    def parser(self, request: Request) -> ReplyParser:
        """What reads the answer to ``request``."""
        identity = f"{request.prompt} {request.sampling.seed}".encode()
        return ReplyParser(self.form, hashlib.sha256(identity).digest())


def plan_chat(body: ChatRequest, template: ChatTemplate, dialect: Dialect, name: str) -> ChatPlan:
    """How a request is answered by the model called ``name``. Raises ApiError and TemplateError."""
    tools = _tools_in_force(body)
    think = _thinking(body, template, dialect, name)
    effort = body.reasoning_effort is not None and not template.has_thinking_toggle
    generic = dialect.calls is None
    rendered = render_chat(
        template, body.messages, tools=tools, enable_thinking=think, generic=generic
    )
    functions = {tool.function.name: _function_of(tool) for tool in tools}
    if generic:
        dialect = generic_dialect(dialect)
    reasoning = dialect.reasoning
    thinking = reasoning is not None and reasoning.opened_by(rendered.text)
    many = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    grammar, enforced = _grammar_of(body, tools, functions, dialect, many, generic)
    if grammar is not None:
        may_think = reasoning is not None and not reasoning.closed_by(rendered.text)
        grammar = (
            dialect.after_thoughts(grammar, thinking) if may_think else f"start: body\n{grammar}"
        )
    form = ReplyForm(
        dialect,
        functions,
        many,
        enforced=enforced,
        thinking=thinking,
        exact=grammar is not None,
        forced=forced,
    )
    spoken = tuple(
        tuple(message.token_ids)
        for message in body.messages
        if isinstance(message, AssistantMessage) and message.token_ids
    )
    return ChatPlan(rendered, grammar, form, ("reasoning_effort",) if effort else (), spoken)


def masks_of(
    plan: ChatPlan, grammars: Grammars, requests: Sequence[Request]
) -> dict[int, TokenMasks]:
    """Masks for each request of a plan, the first one computed; none without a grammar. Raises
    ApiError."""
    if plan.grammar is None:
        return {}
    param = plan.grammar_param
    if any(request.ignore_end for request in requests):
        raise ApiError(400, f"ignore_eos and {param} contradict each other", param="ignore_eos")
    try:
        masks = grammars.masks(plan.grammar, len(requests))
        for one in masks:
            one([])
    except (GrammarRefused, GrammarBroke) as refused:
        raise grammar_error(param, str(refused)) from None
    except GrammarsBusy:
        raise ApiError(
            503, "other grammars are being compiled", code="overloaded", retry_after=1, retry=True
        ) from None
    return dict(zip((request.id for request in requests), masks, strict=True))


def grammar_error(param: str, problem: str) -> ApiError:
    """What a client is told of a grammar that its request asks for and that cannot be held to."""
    return ApiError(400, f"{param} {problem}", param=param, code="unsupported_schema", retry=False)


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    enable_thinking: bool | None = None,
    generic: bool = False,
) -> RenderedChat:
    """The prompt of a conversation; ``generic`` tells the model of tools and calls in texts. Raises
    ApiError and TemplateError."""
    turns = turns_of(messages)
    told = [_without_strict(tool) for tool in tools]
    if generic:
        if tools or any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns):
            turns = written_as_text(turns, told, template.takes_system)
        told = []
    return template.render(turns, tools=told or None, enable_thinking=enable_thinking)


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Messages as templates know them, the arguments of calls as texts."""
    turns = []
    for place, message in enumerate(messages):
        turn: Turn = {"role": _role_of(message), "content": _content_of(message)}
        if message.name is not None:
            turn["name"] = message.name
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = message.tool_call_id
        if isinstance(message, AssistantMessage):
            said = message.content is not None or message.refusal is not None
            if not said and not message.tool_calls:
                param = f"messages[{place}].content"
                raise ApiError(400, f"{param} is missing", param=param, code="invalid_value")
            if message.reasoning_content is not None:
                turn["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                turn["tool_calls"] = _calls_of(message.tool_calls, place)
        turns.append(turn)
    return turns


def _role_of(message: Message) -> str:
    role = str(message.__struct_config__.tag)
    return "system" if role == "developer" else role


def _content_of(message: Message) -> str | list[Turn] | None:
    if message.content is None and isinstance(message, AssistantMessage):
        return message.refusal
    if message.content is None or isinstance(message.content, str):
        return message.content
    return [{"type": "text", "text": part.text} for part in message.content]


def _calls_of(calls: Sequence[ToolCall], place: int) -> list[Turn]:
    told = []
    for number, call in enumerate(calls):
        arguments = call.function.arguments if call.function.arguments.strip() else "{}"
        _check_arguments(arguments, place, number)
        function = {"name": call.function.name, "arguments": arguments}
        told.append({"id": call.id, "type": "function", "function": function})
    return told


def _check_arguments(text: str, message: int, call: int) -> None:
    place = f"messages[{message}].tool_calls[{call}].function.arguments"
    try:
        value = loads(text.encode())
    except (BadJson, UnicodeEncodeError) as error:
        raise ApiError(400, f"{place}: {error}", param=place, code="invalid_value") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{place} is no JSON object", param=place, code="invalid_value")


def _tools_in_force(body: ChatRequest) -> list[Tool]:
    """The tools the model is told of."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise ApiError(400, f"tools has {twice!r} twice", param="tools", code="invalid_value")
    chosen = body.tool_choice
    if isinstance(chosen, NamedTool):
        tools = [tool for tool in tools if tool.function.name == chosen.function.name]
        if not tools:
            raise ApiError(
                400,
                f"tool_choice names {chosen.function.name!r}, which is not among the tools",
                param="tool_choice",
                code="invalid_value",
            )
    elif chosen in ("required", "auto") and not tools:
        raise ApiError(
            400, f"tool_choice {chosen} needs tools", param="tool_choice", code="invalid_value"
        )
    elif chosen == "none":
        tools = []
    return tools


def _thinking(
    body: ChatRequest, template: ChatTemplate, dialect: Dialect, name: str
) -> bool | None:
    """Whether the model is to think, None where nobody says. An effort is a hint, which a model
    without a switch cannot take."""
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    requested = {
        "enable_thinking": body.enable_thinking,
        "chat_template_kwargs": None if kwargs is None else kwargs.enable_thinking,
        "reasoning_effort": None if effort is None else effort not in NO_EFFORT,
    }
    said = {param: value for param, value in requested.items() if value is not None}
    if not said:
        return None
    if len(set(said.values())) > 1:
        raise ApiError(
            400,
            f"{' and '.join(said)} contradict each other",
            param=next(iter(said)),
            code="invalid_value",
        )
    param, value = next(iter(said.items()))
    if template.has_thinking_toggle:
        return value
    if param != "reasoning_effort" and value != (dialect.reasoning is not None):
        raise _unsupported(param, f"{name} has no switch for thinking")
    return None


def _grammar_of(
    body: ChatRequest,
    tools: Sequence[Tool],
    functions: Mapping[str, Function],
    dialect: Dialect,
    many: bool,
    generic: bool,
) -> tuple[str | None, bool]:
    """The rules of an answer, if it has some, and whether its calls are made by them: always where
    the model was told of calls in a ``generic`` way."""
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    requested = list(functions.values())
    answer = format_rule(body.response_format)
    if forced:
        return _enforced("tools", lambda: dialect.forced_calls(requested, many)), True
    if answer is not None and tools:
        calls = _enforced("tools", lambda: dialect.forced_calls(requested, many))
        either = calls.replace("body: ", "made: ", 1)
        return f"body: made | answer\nanswer: {answer}\n{either}", False
    if answer is not None:
        return f"body: {answer}", False
    strict = {tool.function.name for tool in tools if tool.function.strict}
    if generic and tools:
        requested = enforced_functions(requested, strict)
    if strict or (generic and tools):
        return _enforced("tools", lambda: dialect.calls_in_text(requested, many)), True
    return None, False


def format_rule(requested: ResponseFormat | None) -> str | None:
    """What an answer of a form is in Lark; None for any text. Raises ApiError."""
    match requested:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return json_rule(ANY_OBJECT)
        case JsonSchemaFormat(json_schema=told):
            place = "response_format.json_schema.schema"
            schema = told.schema_
            if schema is None:
                raise ApiError(400, f"{place} is missing", param=place, code="invalid_value")
            return _enforced(place, lambda: json_rule(schema), param="response_format")
        case RegexFormat(regex=regex):
            try:
                return regex_rule(regex)
            except GrammarRefused as refused:
                raise grammar_error("response_format", str(refused)) from None


def _enforced(place: str, rules: Callable[[], str], param: str | None = None) -> str:
    try:
        return rules()
    except SchemaRefused as refused:
        raise ApiError(
            400,
            f"{place}: {refused}; it would have to be ignored, so the request is refused",
            param=param or place,
            code="unsupported_schema",
        ) from None


def _function_of(tool: Tool) -> Function:
    return Function(tool.function.name, tool.function.parameters or ANY_OBJECT)


def _without_strict(tool: Tool) -> dict[str, Any]:
    """A tool as templates know it; whether calls are enforced is not the model's business."""
    told: dict[str, Any] = msgspec.to_builtins(tool)
    told["function"].pop("strict", None)
    return told


def _unsupported(param: str, problem: str) -> ApiError:
    return ApiError(400, problem, param=param, code="unsupported")
