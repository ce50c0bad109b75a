"""Translates requests of ``/v1/responses`` to chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from harness.serve.answers import Json
from harness.serve.errors import invalid_value, unsupported
from harness.serve.responses.namespaces import NAMESPACE, joined_name, out_of_namespaces
from harness.serve.responses.wire import (
    LOGPROBS,
    REFERENCE,
    ChosenFunction,
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponseTextFormat,
)
from harness.serve.tool_selection import (
    HOSTED,
    NO_FUNCTIONS,
    allowed_tools,
    kind_of,
    without_hosted_tools,
    without_kinds,
)
from harness.serve.wire import given_fields, plain

REASONING, TOKENS = "reasoning_content", "token_ids"
SAME = (
    *("model", "temperature", "top_p", "top_k", "seed", "stream", "service_tier", "user"),
    *("safety_identifier", "prompt_cache_key", "metadata", "parallel_tool_calls", "stop"),
    *("ignore_eos", "repetition_penalty", "chat_template_kwargs"),
)
"""Fields that chat completions call the same."""
UNFINISHED = ("in_progress", "incomplete")
"""States of a last assistant message that the answer continues."""
LEFT_OUT = tuple(kind for kind in NO_FUNCTIONS if kind != NAMESPACE)
CUSTOM = {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}
CALLS_BY_SERVER = (*HOSTED, "local_shell_call", "shell_call", "apply_patch_call", "compaction")
"""Prefixes of types of items that only servers make."""


def readable_items(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A body with only the tools and items that this server knows; others are named in
    ``ignored``. Raises ApiError for an answer in the background."""
    if value.get("background") is True:
        raise unsupported(
            "background", "background: no answer is made while its client is away; stream it"
        )
    value = without_hosted_tools(value, ignored, LEFT_OUT)
    value = allowed_tools(out_of_namespaces(value, ignored))
    if value.get("truncation") == "auto":
        # A conversation that is too long is refused, never truncated.
        ignored.append("truncation")
        value = {name: given for name, given in value.items() if name != "truncation"}
    items = value.get("input")
    if not isinstance(items, list):
        return value
    own = without_kinds("input", items, CALLS_BY_SERVER, ignored)
    return value | {"input": [_own_item(item) for item in own]}


def _own_item(item: Any) -> Any:
    """A call of a tool with free-form input, or its output, as one of a function; a bare id as a
    reference; any other item unchanged."""
    if isinstance(item, dict) and item.keys() == {"id"}:
        return item | {"type": REFERENCE}
    kind = CUSTOM.get(kind_of(item))
    if kind is None:
        return item
    fields = {name: given for name, given in item.items() if name != "input"} | {"type": kind}
    if kind == "function_call":
        fields["arguments"] = json.dumps({"input": item.get("input")})
    return fields


def chat_of(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> Json:
    """The chat request for a body that continues a conversation of ``earlier`` items. Raises
    ApiError."""
    chat: Json = {"messages": list(_messages(body, earlier))}
    last = items_of(body)[-1]
    if (last.type, last.role) == ("message", "assistant") and last.content:
        chat["continue_final_message"] = last.status in UNFINISHED
    chat |= plain(given_fields(body, SAME))
    if body.logits_digest:
        chat["logits_digest"] = True
    if body.stream:
        chat["stream_options"] = {"include_usage": True}
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if lists_tokens(body):
        chat["logprobs"], chat["top_logprobs"] = True, body.top_logprobs or 0
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    return chat | _tools(body)


def lists_tokens(body: ResponsesRequest) -> bool:
    """Whether the answer lists the tokens of its text."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def items_of(body: ResponsesRequest) -> list[InputItem]:
    """The items that a request adds to its conversation."""
    if isinstance(body.input, str):
        return [InputItem(role="user", content=body.input)]
    return body.input


def references_of(body: ResponsesRequest) -> dict[str, str]:
    """The ids of stored items that a body refers to, with the field of each. Raises ApiError."""
    fields: dict[str, str] = {}
    for index, item in enumerate(items_of(body)):
        if item.type == REFERENCE:
            id, field = _require(item, index, "id"), f"input[{index}].id"
            if id in fields:
                # Otherwise a small body could stand for many copies of a large item.
                raise invalid_value(field, f"{field}: {id[:64]!r} is also {fields[id]}")
            fields[id] = field
    return fields


def with_references(body: ResponsesRequest, stored: Mapping[str, InputItem]) -> ResponsesRequest:
    """``body`` with its references replaced by the ``stored`` items, by id."""
    items = [
        stored.get(item.id or "", item) if item.type == REFERENCE else item
        for item in items_of(body)
    ]
    return msgspec.structs.replace(body, input=items)


def _messages(body: ResponsesRequest, earlier: Sequence[InputItem]) -> Iterable[Json]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    turn: Json = {}
    for index, item in enumerate([*earlier, *items_of(body)], -len(earlier)):
        more = _said_by_model(item, index)
        # Calls belong to the reasoning and text before them; other items begin a turn.
        if more is None or ("tool_calls" not in more and turn.keys() - {REASONING, TOKENS}):
            yield from _turn(turn)
            turn = {}
        if more is None:
            yield _given_to_model(item, index)
        elif "tool_calls" in more:
            turn.setdefault("tool_calls", []).extend(more["tool_calls"])
        else:
            turn |= more
        if more is not None and item.token_ids:
            turn[TOKENS] = item.token_ids
    yield from _turn(turn)


def _said_by_model(item: InputItem, index: int) -> Json | None:
    """The fields that an item adds to an assistant message; None for an item of another role."""
    if item.type == "reasoning":
        reasoning = item.content or item.summary
        return {REASONING: _text(reasoning)} if reasoning else {}
    if item.type == "function_call":
        name, arguments = _require(item, index, "name"), _require(item, index, "arguments")
        function = {"name": joined_name(item.namespace, name), "arguments": arguments}
        call = {"id": _require(item, index, "call_id"), "type": "function", "function": function}
        return {"tool_calls": [call]}
    if item.type == "message" and item.role == "assistant":
        return {"content": _text(_require(item, index, "content"))}
    return None


def _given_to_model(item: InputItem, index: int) -> Json:
    if item.type == "function_call_output":
        call_id, output = _require(item, index, "call_id"), _require(item, index, "output")
        return {"role": "tool", "tool_call_id": call_id, "content": _text(output)}
    role, content = _require(item, index, "role"), _require(item, index, "content")
    return {"role": role, "content": _text(content)}


def _turn(turn: Json) -> Iterable[Json]:
    """The assistant message of a turn; none if it has only reasoning."""
    if turn.keys() - {REASONING, TOKENS}:
        yield {"role": "assistant", "content": None, **turn}


def _require(item: InputItem, index: int, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        field = f"input[{index}].{name}"
        raise invalid_value(field, f"{field}: a {item.type} has one")
    return value


def _text(content: str | Sequence[InputPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal or "" for part in content)


def _format(requested: ResponseTextFormat) -> Json:
    if requested.type != "json_schema":
        return {"type": requested.type}
    schema = {"name": requested.name, "schema": requested.schema_}
    for name, value in schema.items():
        if value is None:
            field = f"text.format.{name}"
            raise invalid_value(field, f"{field} is missing")
    schema |= given_fields(requested, ("description", "strict"))
    return {"type": "json_schema", "json_schema": schema}


def _tools(body: ResponsesRequest) -> Json:
    chat: Json = {}
    if body.tools:
        chat["tools"] = []
        for tool in body.tools:
            function = given_fields(tool, ("description", "parameters", "strict"))
            function["name"] = tool.called
            chat["tools"].append({"type": "function", "function": function})
    if isinstance(body.tool_choice, ChosenFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.called}}
    elif body.tool_choice == "required" or (body.tool_choice is not None and body.tools):
        chat["tool_choice"] = body.tool_choice
    return chat
