"""What ``POST /v1/responses`` is sent, and the conversation it means: nothing is stored, so all of
it is in every request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.wire import (
    MOST_MESSAGES,
    Id,
    MaxTokens,
    Seed,
    Share,
    Temperature,
    Tier,
    TopK,
    TopLogprobs,
)
from harness.serve.wire_tools import ReasoningEffort

THOUGHTS = "reasoning_content"
LOGPROBS = "message.output_text.logprobs"


class InputPart(Struct, forbid_unknown_fields=True):
    """A piece of a message, sent or given back as it was answered. What else answers have beside
    their text says nothing to a model."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A turn of the conversation: a message, a call of a function, what it gave, or thoughts.

    Items of an answer can be sent back as they are, of other servers' answers, too: of thoughts
    whose text is encrypted the summary is read.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: Id | None = None
    name: Id | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: Any = None


class ResponseFunction(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function the model may call."""

    type: Literal["function"]
    name: Id
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The function that is to be called."""

    type: Literal["function"]
    name: Id


class ResponseTextFormat(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the text: any, a JSON object, or what a JSON schema says."""

    type: Literal["text", "json_object", "json_schema"]
    name: Id | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = field(default=None, name="schema")
    strict: bool | None = None


class ResponseText(Struct, forbid_unknown_fields=True):
    """How text is to be."""

    format: ResponseTextFormat | None = None


class ResponseReasoning(Struct, forbid_unknown_fields=True):
    """Whether the model thinks first."""

    effort: ReasoningEffort | None = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/responses``. ``store`` may be left out or false: nothing is. ``user``,
    ``safety_identifier``, ``prompt_cache_key`` and ``metadata`` change nothing.
    ``logits_digest`` is that of chat completions. ``include`` of ``message.output_text.logprobs``
    has every token of the text listed, with ``top_logprobs`` of the likeliest."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: Id | None = None
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    logits_digest: bool = False
    stream: bool | None = None
    text: ResponseText | None = None
    tools: list[ResponseFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Id] | None = None
    top_logprobs: TopLogprobs | None = None
    service_tier: Tier | None = None
    user: Id | None = None
    safety_identifier: Id | None = None
    prompt_cache_key: Id | None = None
    metadata: dict[str, str] | None = None


CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
}
"""What chat completions call a field that is called otherwise here."""


def chat_of(body: ResponsesRequest) -> Json:
    """The body of the chat completion that a request means. Raises ApiError."""
    if body.store:
        raise _not_stored("store", "send store false, or leave it out")
    if body.previous_response_id is not None:
        raise _not_stored("previous_response_id", "send the whole conversation as input")
    chat: Json = {"messages": list(_messages(body))}
    for name in (
        *("model", "temperature", "top_p", "top_k", "seed", "stream", "service_tier", "user"),
        *("safety_identifier", "prompt_cache_key", "metadata", "parallel_tool_calls"),
    ):
        value = getattr(body, name)
        if value is not None:
            chat[name] = value
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
    """Whether the tokens of the text are told."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _messages(body: ResponsesRequest) -> Iterable[Json]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    turn: Json = {}
    for index, item in enumerate(body.input):
        more = _said_by_model(item, index)
        # Calls go with the thoughts and the text before them; other items begin a turn.
        if more is None or ("tool_calls" not in more and turn.keys() - {THOUGHTS}):
            yield from _turn(turn)
            turn = {}
        if more is None:
            yield _given_to_model(item, index)
        elif "tool_calls" in more:
            turn.setdefault("tool_calls", []).extend(more["tool_calls"])
        else:
            turn |= more
    yield from _turn(turn)


def _said_by_model(item: InputItem, index: int) -> Json | None:
    """What an item adds to a turn of the model; None for one that the model was given."""
    if item.type == "reasoning":
        thoughts = item.content or item.summary
        return {THOUGHTS: _text(thoughts)} if thoughts else {}
    if item.type == "function_call":
        name, arguments = _given(item, index, "name"), _given(item, index, "arguments")
        function = {"name": name, "arguments": arguments}
        call = {"id": _given(item, index, "call_id"), "type": "function", "function": function}
        return {"tool_calls": [call]}
    if item.type == "message" and item.role == "assistant":
        return {"content": _text(_given(item, index, "content"))}
    return None


def _given_to_model(item: InputItem, index: int) -> Json:
    if item.type == "function_call_output":
        call_id, output = _given(item, index, "call_id"), _given(item, index, "output")
        return {"role": "tool", "tool_call_id": call_id, "content": _text(output)}
    role, content = _given(item, index, "role"), _given(item, index, "content")
    return {"role": role, "content": _text(content)}


def _turn(told: Json) -> Iterable[Json]:
    """The message of the model that a turn is, if it is one: thoughts alone are none."""
    if told.keys() - {THOUGHTS}:
        yield {"role": "assistant", "content": None, **told}


def _given(item: InputItem, index: int, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        place = f"input[{index}].{name}"
        raise ApiError(400, f"{place}: a {item.type} has one", param=place, code="invalid_value")
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
            place = f"text.format.{name}"
            raise ApiError(400, f"{place} is missing", param=place, code="invalid_value")
    for name in ("description", "strict"):
        if getattr(requested, name) is not None:
            schema[name] = getattr(requested, name)
    return {"type": "json_schema", "json_schema": schema}


def _tools(body: ResponsesRequest) -> Json:
    chat: Json = {}
    if body.tools:
        chat["tools"] = []
        for tool in body.tools:
            function = {"name": tool.name}
            for name in ("description", "parameters", "strict"):
                if getattr(tool, name) is not None:
                    function[name] = getattr(tool, name)
            chat["tools"].append({"type": "function", "function": function})
    if isinstance(body.tool_choice, ChosenFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None and body.tools:
        chat["tool_choice"] = body.tool_choice
    return chat


def _not_stored(field: str, advice: str) -> ApiError:
    return ApiError(400, f"no answer is stored here; {advice}", param=field, code="not_stored")
