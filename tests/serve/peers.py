"""What a peer's test asks of its server, as a request of our own words, and what becomes of it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
PASS, ABSENT, REFUSED = "pass", "n/a", "refused by design"
MEDIA = "this server takes text"
TURN = {"role": "user", "content": "Why is the sky blue?"}
TALK = {"messages": [{"role": "system", "content": "Be brief."}, TURN], "max_tokens": 8, "seed": 1}
ASKED = {"prompt": "The sky is", "max_tokens": 8, "seed": 1}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
WHOLE = {"options": {"num_predict": 8, "seed": 1}, "stream": False}
"""What makes an answer of Ollama's routes short, and one object."""
TABLE = Path(__file__).with_name("peers.toml")
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: TALK,
    TEXT: ASKED,
    "/completion": ASKED,
    MESSAGES: {"model": "tiny", "max_tokens": 8, "messages": [TURN], "seed": 1},
    RESPONSES: {"input": "Go.", "max_output_tokens": 8, "reasoning": {"effort": "none"}, "seed": 1},
    "/api/chat": {"model": "tiny", "messages": [TURN], **WHOLE},
    "/api/generate": {"model": "tiny", "prompt": "The sky is", **WHOLE},
}
"""The requests that ``peers.toml`` adds to."""
MUST = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "enable_thinking": False}


@dataclass(frozen=True)
class Row:
    """A test of a peer's. ``has`` are places in the answer with their values, ``...`` for any; a
    stream is the list of its objects. ``why`` says why it is not served, or not as the peer
    does."""

    test: str
    verdict: str = PASS
    path: str = ""
    body: Any = None
    has: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    why: str = ""


def passes(test: str, path: str, body: Any = None, status: int = 200, **has: Any) -> Row:
    """A request that does here what the peer's test asks for. Places are written with ``__``."""
    return Row(test, PASS, path, body, places(has), status)


def refused(test: str, why: str, path: str, body: Any = None, status: int = 400, **has: Any) -> Row:
    """A request that this server refuses by design."""
    return Row(test, REFUSED, path, body, places(has), status, why)


def absent(test: str, why: str, path: str = "", body: Any = None, **has: Any) -> Row:
    """A test about what is not there: its route, where it has one, is 404."""
    return Row(test, ABSENT, path, body, places(has), 404 if path else 0, why)


def places(has: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in has.items()}


def more_of(peer: str) -> Iterator[Row]:
    """The rows of ``peers.toml``."""
    for test, verdict, *asked in tomllib.loads(TABLE.read_text())[peer]:
        if verdict == ABSENT:
            why, path, body = [*asked, *("", "null")[len(asked) - 1 :]]
            yield absent(test, why, path, json.loads(body))
            continue
        path, body, has, end = [*asked, *("", "{}", 200)[len(asked) - 1 :]]
        value = json.loads(body) if body else None
        value = PLAIN.get(path, {}) | value if isinstance(value, dict) else value
        expected = {place: ... if one == "*" else one for place, one in json.loads(has).items()}
        why, status = (end, 400) if verdict == REFUSED else ("", end)
        yield Row(test, verdict, path, value, expected, status, why)


def found(value: Any, place: str) -> Any:
    """What is at a place; KeyError, IndexError or TypeError where nothing is."""
    for name in place.split("."):
        value = value[int(name.replace("last", "-1"))] if isinstance(value, list) else value[name]
    return value
