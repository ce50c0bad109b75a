"""Reads saved answers: JSON objects, and recorded streams, which are assembled to whole answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, system_errors_as
from harness.client import DONE, data_lines
from harness.serve.strict_json import BadJson, loads, object_or_empty

Json = dict[str, Any]
BEGINNINGS = (b"data:", b"event:", b":")
"""How a stream of server-sent events begins."""
ENDS = ("response.completed", "response.incomplete")
TEXTS = ("content", "reasoning_content")
CUT = "the stream was cut or failed: it has no end"


def read_object(path: Path) -> Json:
    """The JSON object a file holds. Raises ConfigError."""
    return _object(_bytes(path), path)


def read_answer(path: Path) -> Json:
    """The answer a file holds: a JSON object, or a stream of events as a client received it. Raises
    ConfigError."""
    data = _bytes(path)
    if not data.lstrip().startswith(BEGINNINGS):
        parts = data.strip().split(b"\n")
        if len(parts) > 1 and b'"done"' in parts[0]:
            return _whole_of_lines([_object(part, path) for part in parts], path)
        return _object(data, path)
    lines = list(data_lines([data, b"\n"]))
    objects = [_object(line.encode(), path) for line in lines if line != DONE]
    try:
        if objects and objects[0].get("type") == "message_start":
            return _whole_message_of(objects)
        if objects and "type" in objects[0]:
            return _whole_response(objects)
        if DONE not in lines or not objects:
            raise ConfigError(CUT)
        return _whole_completion(objects)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(f"{path}: is no stream of this server") from None


def _whole_of_lines(objects: Sequence[Json], path: Path) -> Json:
    """The answer that lines of ``/api/chat`` or ``/api/generate`` add up to."""
    if not objects[-1].get("done"):
        raise ConfigError(f"{path}: {CUT}")
    whole = dict(objects[-1])
    try:
        for name in ("response", "thinking"):
            if text := "".join(one.get(name) or "" for one in objects):
                whole[name] = text
        if listed := [token for one in objects for token in one.get("logprobs") or ()]:
            whole["logprobs"] = listed
        if "message" in whole:
            messages = [one["message"] for one in objects]
            message: Json = {
                "role": "assistant",
                "content": "".join(m["content"] for m in messages),
            }
            if reasoning := "".join(m.get("thinking") or "" for m in messages):
                message["thinking"] = reasoning
            if calls := [call for m in messages for call in m.get("tool_calls") or ()]:
                message["tool_calls"] = calls
            whole["message"] = message
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: is no stream of this server") from None
    return whole


def _bytes(path: Path) -> bytes:
    with system_errors_as(f"{path}: cannot read"):
        return path.read_bytes()


def _object(data: bytes, path: Path) -> Json:
    try:
        value = loads(data)
    except BadJson as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is no JSON object")
    return value


def _whole_completion(chunks: Sequence[Json]) -> Json:
    """The answer that chunks of ``/v1/chat/completions`` or ``/v1/completions`` add up to."""
    choices: dict[int, list[Json]] = {}
    extra: Json = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        extra |= chunk.get("x_zinc") or {}
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    whole = [_whole_choice(index, choices[index]) for index in sorted(choices)]
    fingerprint = chunks[0]["system_fingerprint"]
    answer = {"system_fingerprint": fingerprint, "choices": whole, "x_zinc": extra}
    return answer | {"usage": usage}


def _whole_choice(index: int, parts: Sequence[Json]) -> Json:
    listed = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    logprobs = None
    if listed:
        logprobs = {name: _added(one[name] for one in listed) for name in listed[0]}
    whole: Json = {"index": index, "logprobs": logprobs}
    whole["finish_reason"] = parts[-1]["finish_reason"]
    if "text" in parts[0]:
        return whole | {"text": "".join(part["text"] for part in parts)}
    return whole | {"message": _whole_message([part["delta"] for part in parts])}


def _added(values: Iterable[Any]) -> Any:
    """The concatenation of lists; None if there are none."""
    lists = [value for value in values if value is not None]
    return [item for value in lists for item in value] if lists else None


def _whole_message(deltas: Sequence[Json]) -> Json:
    content, reasoning = ("".join(delta.get(name) or "" for delta in deltas) for name in TEXTS)
    calls: list[Json] = []
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                calls.append({key: call[key] for key in ("id", "type")})
                calls[-1]["function"] = dict(call["function"])
            else:
                function = calls[call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
    message: Json = {"role": deltas[0]["role"], "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _whole_response(events: Sequence[Json]) -> Json:
    """The answer in the last event of ``/v1/responses``, after checking it against the earlier
    events."""
    if events[-1]["type"] not in ENDS:
        raise ConfigError(CUT)
    response: Json = events[-1]["response"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            index = event["output_index"]
            texts[index] = texts.get(index, "") + event["delta"]
    for index, item in enumerate(response["output"]):
        if item["type"] == "function_call":
            text = item["arguments"]
        else:
            text = "".join(part["text"] for part in item["content"])
        if texts.get(index, "") != text:
            raise ConfigError(f"output[{index}] is not what the events before the last one hold")
    return response


def _whole_message_of(events: Sequence[Json]) -> Json:
    """The message that events of ``/v1/messages`` add up to."""
    message: Json = events[0]["message"]
    if events[-1]["type"] != "message_stop":
        raise ConfigError(CUT)
    arguments: dict[int, str] = {}
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                name = delta["type"].removesuffix("_delta")
                if name == "input_json":
                    at = event["index"]
                    arguments[at] = arguments.get(at, "") + delta["partial_json"]
                else:
                    message["content"][event["index"]][name] += delta[name]
            case "message_delta":
                message |= event["delta"]
                message |= {name: event[name] for name in event if name not in ("type", "delta")}
    for index, text in arguments.items():
        message["content"][index]["input"] = object_or_empty(text)
    return message
