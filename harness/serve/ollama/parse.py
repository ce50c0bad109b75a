"""Translates requests of Ollama's API to chat completions and text completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.serve.answers import Json
from harness.serve.errors import ApiError, renaming, unsupported
from harness.serve.ollama.wire import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    SamplingOptions,
)
from harness.serve.wire import ChatRequest, CompletionRequest, Sampling, converted, given_fields

NAMES = {
    "reasoning_effort": "think",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "continue_final_message": "messages",
}
client_name = renaming(NAMES)
"""This API's names of fields of chat completions."""
prompt_name = renaming(NAMES | {"messages": "prompt"})
"""The same for requests with a prompt."""
UNSERVED = ("template", "context")
EFFORTS: Mapping[bool | str, str] = {True: "medium", False: "none", "max": "high"}
"""The ``reasoning_effort`` for values of ``think`` that have another name."""


def plain_schemas(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A body without the nulls that clients write into schemas of tools, and with lower-case
    roles."""
    tools, turns = value.get("tools"), value.get("messages")
    if isinstance(turns, list):
        value = value | {"messages": [_in_small_letters(turn) for turn in turns]}
    return value | {"tools": _without_nulls(tools)} if isinstance(tools, list) else value


def _in_small_letters(turn: Any) -> Any:
    role = turn.get("role") if isinstance(turn, dict) else None
    return turn | {"role": role.lower()} if isinstance(role, str) else turn


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(one)
            for name, one in value.items()
            if one is not None or name == "const"
        }
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """The chat completion for a conversation. Raises ApiError."""
    chat = _common(body) | {"messages": list(_messages(body.messages))}
    if body.tools:
        chat["tools"] = body.tools
    last = body.messages[-1] if body.messages else None
    if last is not None and last.role == "assistant" and last.content and not last.tool_calls:
        chat["continue_final_message"] = True
    return converted(chat, ChatRequest)


def chat_of_prompt(body: GenerateRequest) -> ChatRequest:
    """The chat completion for a prompt. Raises ApiError."""
    _check(body)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return converted(_common(body) | {"messages": messages}, ChatRequest)


def text_of_prompt(body: GenerateRequest) -> CompletionRequest:
    """The completion for a raw prompt. Raises ApiError."""
    _check(body)
    text = {name: value for name, value in _common(body).items() if name not in CHAT_ONLY}
    more: Json = {"suffix": body.suffix} if body.suffix else {}
    if body.logprobs:
        more["logprobs"] = body.top_logprobs
    text = {"n_predict": -1} | text | {"prompt": body.prompt} | more
    return converted(text, CompletionRequest)


CHAT_ONLY = ("response_format", "reasoning_effort", "logprobs", "top_logprobs")


def _check(body: GenerateRequest) -> None:
    for name in UNSERVED:
        if getattr(body, name):
            raise unsupported(name, f"{name} is not served here; leave it out")
    if body.images:
        raise _images("images")


def _common(body: OllamaChatRequest | GenerateRequest) -> Json:
    """The chat completion's fields that both requests have."""
    chat: Json = {"model": body.model, "stream": body.stream}
    if body.stream:
        chat["stream_options"] = {"include_usage": True}
    options = body.options or SamplingOptions()
    chat |= given_fields(options, Sampling.__struct_fields__)
    if options.num_predict is not None:
        chat["n_predict"] = max(-1, options.num_predict)
    if body.think is not None:
        chat["reasoning_effort"] = EFFORTS.get(body.think, body.think)
    if body.logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    form = body.format
    if isinstance(form, dict):
        schema = {"name": "format", "schema": form}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form == "json":
        chat["response_format"] = {"type": "json_object"}
    elif form:
        raise unsupported("format", 'format is "json" or a JSON schema')
    return chat


def _messages(turns: Sequence[OllamaMessage]) -> Iterable[Json]:
    """The messages, with ids for calls, which this API does not have. Results come in the order of
    calls."""
    waiting: list[tuple[str, str]] = []
    for number, turn in enumerate(turns):
        if turn.images:
            raise _images(f"messages[{number}].images")
        message: Json = {"role": turn.role, "content": turn.content or ""}
        if turn.role == "tool":
            answered = turn.tool_call_id or _answered(turn, waiting)
            message["tool_call_id"] = answered
            waiting = [one for one in waiting if one[1] != answered]
        if turn.role == "assistant":
            calls: list[Json] = [
                {
                    "type": "function",
                    "id": call.id or f"call_{number}_{index}",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments or {}),
                    },
                }
                for index, call in enumerate(turn.tool_calls or ())
            ]
            waiting = [(call["function"]["name"], call["id"]) for call in calls]
            if calls:
                message |= {"tool_calls": calls, "content": turn.content or None}
            if turn.thinking:
                message["reasoning_content"] = turn.thinking
        yield message


def _answered(turn: OllamaMessage, waiting: Sequence[tuple[str, str]]) -> str:
    """The id of the call that a result answers: the first open call of its name, or the first open
    one."""
    for name, call_id in waiting:
        if turn.tool_name in (None, name):
            return call_id
    return turn.tool_name or "call"


def _images(param: str) -> ApiError:
    return unsupported(param, f"{param}: this server takes text; images are not served")
