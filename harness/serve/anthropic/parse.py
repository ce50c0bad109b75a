"""Translates requests of the Messages API to chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.serve.answers import Json
from harness.serve.anthropic import wire
from harness.serve.errors import invalid_value, renaming
from harness.serve.tool_selection import HOSTED, without_hosted_tools
from harness.serve.wire import ChatRequest, converted, given_fields

OWN_TOOLS = (*HOSTED, "bash_", "text_editor_", "advisor_")
"""Prefixes of the types of tools that only Anthropic's own models can call."""
OWN_BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "container_upload"),
    *("code_execution_tool_result", "bash_code_execution_tool_result", "mcp_tool", "compaction"),
    *("text_editor_code_execution_tool_result", "tool_search_tool_result", "advisor_tool_result"),
)
"""Prefixes of the types of content blocks that Anthropic's server makes."""
BILLING = "x-anthropic-billing-header:"
"""Begins a block, or the first line, of the system text that is not for the model. It has a digest
of the body, so with it no prompt would find the earlier one in the cache."""
BILLING_FIELDS = re.compile(r"(?:[ \t]*[\w.-]+=[^;\s]*;?)+")
"""The fields after it: ``cc_version=2.1.9.3a1; cc_entrypoint=cli; cch=0af31;``."""
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
}
"""This API's names of fields of chat completions."""
OUTPUT_FORMAT = "output_format"
"""The name that ``output_config.format`` had in the beta."""
SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "seed")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"max": "xhigh"}
FAILED = "Error: "
"""The prefix of the result of a tool call that failed."""


def readable_blocks(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A body without tools and blocks that this server does not know, and without text that is not
    for the model. What is left out is named in ``ignored``."""
    value = _without_billing(without_hosted_tools(value, ignored, OWN_TOOLS), ignored)
    messages = value.get("messages")
    if not isinstance(messages, list):
        return value
    return value | {"messages": [_readable(turn, ignored) for turn in messages]}


def _without_billing(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """The body without the billing header in its system texts. All turns stay, since the last one
    decides whether an answer begins."""
    turns = value.get("messages")
    cleaned = {"system": _system_without_billing(value["system"])} if "system" in value else {}
    if isinstance(turns, list):
        cleaned["messages"] = [_turn_without_billing(turn) for turn in turns]
    if any(value[name] != text for name, text in cleaned.items()):
        ignored.append(f"system ({BILLING[:-1]})")
    return value | cleaned


def _turn_without_billing(turn: Any) -> Any:
    if not isinstance(turn, dict) or turn.get("role") != "system" or "content" not in turn:
        return turn
    return turn | {"content": _system_without_billing(turn["content"])}


def _system_without_billing(system: Any) -> Any:
    if isinstance(system, str):
        return _text_without_billing(system)
    if isinstance(system, list):
        return [one for block in system for one in _block_without_billing(block)]
    return system


def _block_without_billing(block: Any) -> list[Any]:
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str) or not text.startswith(BILLING):
        return [block]
    return [block | {"text": _text_without_billing(text)}] if _text_without_billing(text) else []


def _text_without_billing(text: str) -> str:
    """The text after the header's fields, or after its line if the fields are not recognised."""
    if not text.startswith(BILLING):
        return text
    fields = BILLING_FIELDS.match(text, len(BILLING))
    return (text.partition("\n")[2] if fields is None else text[fields.end() :]).lstrip()


def _readable(turn: Any, ignored: list[str]) -> Any:
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return turn
    own = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind.startswith(OWN_BLOCKS):
            name = f"messages[].content[] ({kind[:64]})"
            ignored += [name] if name not in ignored else []
        else:
            own.append(block)
    return turn | {"content": own}


def names_in(body: wire.CountRequest) -> Callable[[str], str]:
    """A function from a field of chat completions to its name in this body."""
    named = {} if body.output_format is None else {"response_format": OUTPUT_FORMAT}
    return renaming(NAMES | named)


def chat_of(body: wire.CountRequest, can_disable_reasoning: bool) -> ChatRequest:
    """The chat completion for a request. Raises ApiError.

    ``can_disable_reasoning`` says whether the model's template has a switch for it."""
    chat: Json = {"messages": list(_messages(body))}
    if isinstance(body.messages[-1], wire.AssistantTurn):
        chat["continue_final_message"] = True
    if isinstance(body, wire.MessagesRequest):
        chat |= given_fields(body, SAME)
        if body.stop_sequences:
            chat["stop"] = body.stop_sequences
        if body.stream:
            chat["stream_options"] = {"include_usage": True}
    if body.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({"description": tool.description} if tool.description else {}),
                    **({"strict": tool.strict} if tool.strict is not None else {}),
                },
            }
            for tool in body.tools
        ]
    if body.tool_choice is not None:
        chat |= _choice(body.tool_choice, bool(body.tools))
    if (form := _format(body)) is not None:
        schema = {"name": "output", "schema": form.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    effort = _effort(body, can_disable_reasoning)
    if effort is not None:
        chat["reasoning_effort"] = effort
    return converted(chat, ChatRequest)


def _format(body: wire.CountRequest) -> wire.SchemaFormat | None:
    form = None if body.output_config is None else body.output_config.format
    if form is not None and body.output_format is not None:
        problem = f"{OUTPUT_FORMAT} and output_config.format contradict each other; send one"
        raise invalid_value(OUTPUT_FORMAT, problem)
    return form or body.output_format


def _effort(body: wire.CountRequest, can_disable_reasoning: bool) -> str | None:
    """The reasoning effort. As in Anthropic's API the model does not think unless asked to."""
    given = None if body.output_config is None else body.output_config.effort
    if body.thinking is not None and body.thinking.type != "disabled":
        return "medium" if given is None else EFFORTS.get(given, given)
    return "none" if can_disable_reasoning else None


def _choice(choice: wire.AnyChoice, tools: bool) -> Json:
    chat: Json = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if choice.name is None:
            raise invalid_value(
                "tool_choice.name", "tool_choice.name: a choice of type tool has one"
            )
        named = {"type": "function", "function": {"name": choice.name}}
        return chat | {"tool_choice": named}
    return chat | {"tool_choice": CHOICES[choice.type]} if tools or choice.type == "any" else chat


def _messages(body: wire.CountRequest) -> Iterable[Json]:
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for turn in body.messages:
        if isinstance(turn, wire.SystemTurn):
            if turn.content:
                yield {"role": "system", "content": _text(turn.content)}
        else:
            yield from _assistant(turn) if isinstance(turn, wire.AssistantTurn) else _user(turn)


def _user(turn: wire.UserTurn) -> Iterable[Json]:
    """The messages of a user's turn in order: results of calls, and texts."""
    if isinstance(turn.content, str):
        yield {"role": "user", "content": turn.content}
        return
    texts: list[wire.TextBlock] = []
    for block in turn.content:
        if isinstance(block, wire.TextBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": _text(texts)}
            texts = []
        yield _result(block)
    if texts or not turn.content:
        yield {"role": "user", "content": _text(texts)}


def _result(block: wire.ToolResultBlock) -> Json:
    text = _text(block.content or "")
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": FAILED + text if block.is_error else text,
    }


def _assistant(turn: wire.AssistantTurn) -> Iterable[Json]:
    """The message of an assistant's turn."""
    if isinstance(turn.content, str):
        yield {"role": "assistant", "content": turn.content}
        return
    texts = [block.text for block in turn.content if isinstance(block, wire.TextBlock)]
    reasoning = [block.thinking for block in turn.content if isinstance(block, wire.ThinkingBlock)]
    calls = [block for block in turn.content if isinstance(block, wire.ToolUseBlock)]
    message: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.dumps(call.input or {})},
            }
            for call in calls
        ]
    yield message


def _text(content: str | Sequence[wire.TextBlock]) -> str:
    """The text of several blocks, joined by newlines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
