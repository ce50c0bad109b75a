"""What a peer's test asks of its server, as a request of our own words, and what becomes of it."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PASS, ABSENT, REFUSED = "pass", "n/a", "refused by design"
TURN = {"role": "user", "content": "Why is the sky blue?"}
TALK = {"messages": [{"role": "system", "content": "Be brief."}, TURN], "max_tokens": 8, "seed": 1}
ASKED = {"prompt": "The sky is", "max_tokens": 8, "seed": 1}
WHOLE = {"options": {"num_predict": 8, "seed": 1}, "stream": False}
"""What makes an answer of Ollama's routes short, and one object."""
TABLE = Path(__file__).with_name("peers.toml")
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: TALK,
    TEXT: ASKED,
    "/completion": ASKED,
    "/v1/messages": {"model": "tiny", "max_tokens": 8, "messages": [TURN], "seed": 1},
    RESPONSES: {"input": "Go.", "max_output_tokens": 8, "reasoning": {"effort": "none"}, "seed": 1},
    "/api/chat": {"model": "tiny", "messages": [TURN], **WHOLE},
    "/api/generate": {"model": "tiny", "prompt": "The sky is", **WHOLE},
}
"""The requests that ``peers.toml`` adds to."""


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


def rows_of(peer: str) -> Iterator[Row]:
    """The rows of ``peers.toml``."""
    for test, verdict, *asked in tomllib.loads(TABLE.read_text())[peer]:
        if verdict == ABSENT:
            why, path, body, has = [*asked, *("", "null", "{}")[len(asked) - 1 :]]
            status = 404 if path else 0
            yield Row(test, ABSENT, path, json.loads(body), json.loads(has), status, why)
            continue
        path, body, has, end = [*asked, *("", "{}", 200)[len(asked) - 1 :]]
        value = json.loads(body.removeprefix("=")) if body else None
        if isinstance(value, dict) and not body.startswith("="):
            value = PLAIN.get(path, {}) | value
        expected = {place: ... if one == "*" else one for place, one in json.loads(has).items()}
        why, status = (end, 400) if verdict == REFUSED else ("", end)
        if why[:3].isdigit():
            status, why = int(why[:3]), why[5:]
        yield Row(test, verdict, path, value, expected, status, why)


def found(value: Any, place: str) -> Any:
    """What is at a place; KeyError, IndexError or TypeError where nothing is."""
    for name in place.split("."):
        value = value[int(name.replace("last", "-1"))] if isinstance(value, list) else value[name]
    return value
