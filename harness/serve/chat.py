"""Translates a chat request to a prompt, a grammar, and the form of the answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.types import Request
from harness.host.dialect import Dialect
from harness.host.dialect.calls import ANY_OBJECT, Function
from harness.host.harmony_reply import reply_parser
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.thinking import LOWEST_EFFORT
from harness.serve.answer_grammar import FORMAT, GRAMMAR, answer_rule, enforced
from harness.serve.errors import ApiError, invalid_value, unsupported
from harness.serve.generic_tools import enforced_functions, generic_dialect, written_as_text
from harness.serve.strict_json import BadJson, loads
from harness.serve.wire import AssistantMessage, ChatRequest, Message, ToolMessage, plain
from harness.serve.wire_tools import NamedTool, Tool, ToolCall
from reference.model.chat_template import ChatTemplate, RenderedChat

CONTINUE = "continue_final_message"
"""The field by which an answer continues the last message instead of beginning a turn."""
INVALID_ARGUMENTS = "INVALID_JSON"
"""The key under which a template gets arguments that are no JSON object, as Anthropic advises."""
NO_EFFORT = ("none", "minimal")
LEVELS = {"none": LOWEST_EFFORT, "minimal": LOWEST_EFFORT, "xhigh": "high"}
"""The nearest of low, medium and high for the other efforts."""
Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """How a chat request is answered: the rendered prompt, the ``grammar`` of the answer if any,
    its form, the ``ignored`` fields, and ``spoken``: the token ids of earlier answers, as the
    request gives them. ``tools_described``: the server describes tools to a model whose template
    has no syntax of calls that is known."""

    prompt: RenderedChat
    grammar: str | None
    form: ReplyForm
    ignored: tuple[str, ...] = ()
    spoken: tuple[tuple[int, ...], ...] = ()
    format_param: str = FORMAT
    tools_described: bool = False

    @property
    def grammar_param(self) -> str:
        """The request field that the grammar comes from."""
        return "tools" if self.form.functions else self.format_param

    def parser(self, request: Request) -> ReplyParser:
        """The parser of the answer to ``request``."""
        identity = f"{request.prompt} {request.sampling.seed}".encode()
        return reply_parser(self.form, hashlib.sha256(identity).digest())


def plan_chat(body: ChatRequest, template: ChatTemplate, dialect: Dialect, name: str) -> ChatPlan:
    """Plan the answer to a chat request. ``name`` is the model's name for errors. Raises ApiError
    and TemplateError."""
    tools = _tools_in_force(body)
    think = _thinking(body, template, dialect, name)
    effort = body.reasoning_effort
    ignored = effort and not (template.has_thinking_toggle or template.has_reasoning_effort)
    generic = dialect.calls is None
    continued = _continued_text(body)
    rendered = render_chat(
        template,
        body.messages,
        tools=tools,
        enable_thinking=think,
        reasoning_effort=_effort(body, template),
        generic=generic,
        opens_turn=continued is None and body.add_generation_prompt is not False,
    )
    if continued is not None:
        rendered = _cut_after(rendered, continued)
    functions = {
        tool.name: Function(tool.name, tool.parameters or ANY_OBJECT)
        for tool in (tool.function for tool in tools)
    }
    if generic:
        dialect = generic_dialect(dialect, any(tool.function.strict for tool in tools))
    reasoning = dialect.reasoning
    thinking = reasoning is not None and reasoning.opened_by(rendered.text)
    required, named = body.tool_choice == "required", isinstance(body.tool_choice, NamedTool)
    forced = required or named
    many = not named and several_calls(
        body.parallel_tool_calls, required=required, described=generic
    )
    grammar, enforced = _grammar_of(body, tools, functions, dialect, many, generic)
    if grammar is not None and continued is not None:
        raise unsupported(CONTINUE, "an answer that a grammar holds continues no message")
    if grammar is not None:
        may_think = reasoning is not None and not reasoning.closed_by(rendered.text)
        grammar = (
            dialect.after_reasoning(grammar, thinking) if may_think else f"start: body\n{grammar}"
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
    return ChatPlan(
        rendered,
        grammar,
        form,
        ("reasoning_effort",) if ignored else (),
        _spoken(body),
        FORMAT if body.grammar is None else GRAMMAR,
        generic and bool(tools),
    )


def several_calls(asked: bool | None, *, required: bool, described: bool) -> bool:
    """Whether an answer may make several calls, as ``asked`` or else by default. Where tools are
    ``described`` to a model whose template knows none, it may repeat a ``required`` call without
    end, so it makes one by default."""
    return not (required and described) if asked is None else asked


def _spoken(body: ChatRequest) -> tuple[tuple[int, ...], ...]:
    """The token ids that earlier answers come with."""
    return tuple(
        tuple(message.token_ids)
        for message in body.messages
        if isinstance(message, AssistantMessage) and message.token_ids
    )


def _continued_text(body: ChatRequest) -> str | None:
    """The text of the last message, if the answer shall continue it. Raises ApiError."""
    if not body.continue_final_message:
        return None
    last = body.messages[-1]
    if body.add_generation_prompt:
        raise _not_continued("and add_generation_prompt contradict each other")
    if not isinstance(last, AssistantMessage) or last.tool_calls or last.refusal is not None:
        raise _not_continued("needs a text of the assistant's as the last message")
    content = last.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    if not text.strip():
        raise _not_continued("needs a last message that is not empty")
    return text


def _cut_after(rendered: RenderedChat, text: str) -> RenderedChat:
    """The conversation cut after ``text``, the text of its last message. Raises ApiError if the
    template changes that text or writes other text after it."""
    for written in (text, text.strip()):
        at = rendered.text.rfind(written)
        end = at + len(written)
        rest = len(rendered.text) - end
        by_template = sum(max(0, b - max(a, end)) for a, b in rendered.template_spans)
        if at >= 0 and by_template == rest:
            spans = tuple((a, min(b, end)) for a, b in rendered.template_spans if a < end)
            return RenderedChat(rendered.text[:end], spans)
    raise _not_continued(
        "cannot be followed: the template rewrites the last message", "unsupported"
    )


def _not_continued(problem: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{CONTINUE} {problem}", param=CONTINUE, code=code)


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    generic: bool = False,
    opens_turn: bool = True,
) -> RenderedChat:
    """The prompt of a conversation. ``generic`` describes tools in the system text, for templates
    without tools. ``opens_turn`` ends the prompt with the beginning of an answer. Raises ApiError
    and TemplateError."""
    turns = turns_of(messages)
    descriptions = [_without_strict(tool) for tool in tools]
    if generic:
        if tools or any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns):
            turns = written_as_text(turns, descriptions, template.takes_system)
        descriptions = []
    return template.render(
        turns,
        tools=descriptions or None,
        enable_thinking=enable_thinking,
        reasoning_effort=reasoning_effort,
        add_generation_prompt=opens_turn,
    )


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Messages as chat templates read them, with the arguments of calls as text."""
    turns = []
    waiting: Sequence[ToolCall] = ()
    for index, message in enumerate(messages):
        role = str(message.__struct_config__.tag)
        turn: Turn = {
            "role": "system" if role == "developer" else role,
            "content": _content_of(message),
        }
        if message.name is not None:
            turn["name"] = message.name
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = _answered(message, waiting, index)
            waiting = [call for call in waiting if call.id != turn["tool_call_id"]]
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                turn["reasoning_content"] = message.reasoning_content
            waiting = message.tool_calls or ()
            if message.tool_calls:
                turn["tool_calls"] = _calls_of(message.tool_calls, index)
        turns.append(turn)
    return turns


def _answered(message: ToolMessage, waiting: Sequence[ToolCall], index: int) -> str:
    """The id of the call that a tool message answers. Without an id: the first open call, or the
    first one with the message's name."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    for call in waiting:
        if message.name in (None, call.function.name):
            return call.id
    param = f"messages[{index}].tool_call_id"
    raise invalid_value(param, f"{param} is missing, and no call waits for this result")


def _content_of(message: Message) -> str | list[Turn] | None:
    if message.content is None and isinstance(message, AssistantMessage):
        # An answer that was cut off while thinking, or within a required call, has no text.
        return message.refusal if message.refusal or message.tool_calls else ""
    if message.content is None or isinstance(message.content, str):
        return message.content
    return [{"type": "text", "text": part.text} for part in message.content]


def _calls_of(calls: Sequence[ToolCall], message: int) -> list[Turn]:
    rendered = []
    for number, call in enumerate(calls):
        arguments = call.function.arguments or ""
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        arguments = _own_arguments(arguments, message, number)
        function = {"name": call.function.name, "arguments": arguments}
        rendered.append({"id": call.id, "type": "function", "function": function})
    return rendered


def _own_arguments(text: str, message: int, call: int) -> str:
    """The arguments of an earlier call as the text of a JSON object. An answer that was cut off has
    arguments that are none: clients send them back, and the model reads what it wrote as the value
    of ``INVALID_ARGUMENTS``. Raises ApiError for text that is not of whole characters."""
    if text.strip() in ("", "null"):
        return "{}"
    try:
        value = loads(text.encode())
    except UnicodeEncodeError as error:
        param = f"messages[{message}].tool_calls[{call}].function.arguments"
        raise invalid_value(param, f"{param}: {error}") from None
    except BadJson:
        value = None
    if isinstance(value, dict):
        return text
    return json.dumps({INVALID_ARGUMENTS: text}, ensure_ascii=False)


def _tools_in_force(body: ChatRequest) -> list[Tool]:
    """The tools that the prompt describes to the model."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise invalid_value("tools", f"tools has {twice!r} twice")
    chosen = body.tool_choice
    if isinstance(chosen, NamedTool):
        tools = [tool for tool in tools if tool.function.name == chosen.function.name]
        if not tools:
            raise invalid_value(
                "tool_choice",
                f"tool_choice names {chosen.function.name!r}, which is not among the tools",
            )
    elif chosen in ("required", "auto") and not tools:
        raise invalid_value("tool_choice", f"tool_choice {chosen} needs tools")
    elif chosen == "none":
        tools = []
    return tools


def _thinking(
    body: ChatRequest, template: ChatTemplate, dialect: Dialect, name: str
) -> bool | None:
    """Whether the model shall think; None if the request does not say. ``reasoning_effort`` is only
    a hint: a model without a switch for thinking ignores it."""
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    requested = {
        "enable_thinking": body.enable_thinking,
        "chat_template_kwargs": None if kwargs is None else kwargs.enable_thinking,
        "reasoning_effort": None if effort is None else effort not in NO_EFFORT,
    }
    given = {param: value for param, value in requested.items() if value is not None}
    if not given:
        return None
    if len(set(given.values())) > 1:
        raise invalid_value(next(iter(given)), f"{' and '.join(given)} contradict each other")
    param, value = next(iter(given.items()))
    if template.has_thinking_toggle:
        return value
    if template.has_reasoning_effort:
        return None
    if param != "reasoning_effort" and value != (dialect.reasoning is not None):
        raise unsupported(param, f"{name} has no switch for thinking")
    return None


def _effort(body: ChatRequest, template: ChatTemplate) -> str | None:
    """The reasoning effort for the template. A model that always thinks gets the lowest effort if
    thinking is switched off."""
    if (effort := body.reasoning_effort) is not None:
        return LEVELS.get(effort, effort)
    kwargs = body.chat_template_kwargs
    switches = (body.enable_thinking, None if kwargs is None else kwargs.enable_thinking)
    always = template.has_reasoning_effort and not template.has_thinking_toggle
    return LOWEST_EFFORT if always and False in switches else None


def _grammar_of(
    body: ChatRequest,
    tools: Sequence[Tool],
    functions: Mapping[str, Function],
    dialect: Dialect,
    many: bool,
    generic: bool,
) -> tuple[str | None, bool]:
    """The grammar of an answer, None for any text, and whether it makes tool calls well-formed.
    With ``generic`` tools it always does."""
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    requested = list(functions.values())
    answer = answer_rule(body)
    if forced:
        return enforced("tools", lambda: dialect.forced_calls(requested, many)), True
    if answer is not None:
        answer = f"answer: {dialect.before_answer}{answer}"
    if answer is not None and tools:
        calls = enforced("tools", lambda: dialect.forced_calls(requested, many))
        either = calls.replace("body: ", "made: ", 1)
        return f"body: made | answer\n{answer}\n{either}", False
    if answer is not None:
        return f"body: answer\n{answer}", False
    strict = {tool.function.name for tool in tools if tool.function.strict}
    if generic and tools:
        requested = enforced_functions(requested, strict)
    if strict or (generic and tools):
        return enforced("tools", lambda: dialect.calls_in_text(requested, many)), True
    return None, False


def _without_strict(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates read it, without ``strict``."""
    description: dict[str, Any] = plain(tool)
    description["function"].pop("strict", None)
    return description
