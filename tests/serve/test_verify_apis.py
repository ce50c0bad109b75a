"""Answers of each API's routes, replayed by the command line: every count of a usage, and lines of
Ollama's routes."""

import json
from typing import Any

import pytest

from harness.serve.verify import first_difference
from tests.serve.test_verify import CHAT, COMPLETION, RESPONSE

MESSAGE = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 8}
COUNTED = {
    "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE, "/v1/embeddings": {"input": ["hello", "you"]},
}  # fmt: skip
CACHE = ("cached_tokens", "cache_write_tokens", "cache_read_input_tokens")
"""Counts that depend on what the server had computed for others."""


def counts_of(usage: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all numbers in a usage."""
    if isinstance(usage, dict):
        return [found for name in usage for found in counts_of(usage[name], (*path, name))]
    return [path] if type(usage) is int else []


@pytest.mark.parametrize("path", COUNTED)
def test_every_count_is_compared(http, verify, server, path):
    """Negative control: each count of a usage changed, and the usage left out."""
    body = {**COUNTED[path]}
    if path == "/v1/messages":
        body["temperature"] = 0.0
    answer = http.post(path, body).json
    assert verify(body, answer)[0] == 0

    def differs(response: dict[str, Any]) -> bool:
        return first_difference(server.service.model, body, response) is not None

    for names in counts_of(answer["usage"]):
        if names[-1] in CACHE:
            continue
        changed = json.loads(json.dumps(answer))
        holder = changed["usage"]
        for name in names[:-1]:
            holder = holder[name]
        holder[names[-1]] += 1
        assert differs(changed), names
    assert differs({**answer, "usage": None})
    assert differs({**answer, "usage": {}})
    del answer["usage"]
    assert differs(answer)
    assert verify(body, answer)[0] == 1


OLLAMA_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "options": {"num_predict": 8},
}
OLLAMA_TEXT: dict[str, Any] = {"model": "tiny", "prompt": "ab", "options": {"num_predict": 8}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/api/chat", OLLAMA_CHAT | {"logprobs": True}, "message"),
        ("/api/generate", OLLAMA_TEXT, "response"),
        ("/api/generate", OLLAMA_TEXT | {"raw": True, "logprobs": True}, "response"),
    ],
)
def test_answers_of_ollamas_routes(verify, http, path, body, name, stream):
    """Whole and as lines, with a seed that was drawn; one character changed is found, and lines
    that were cut are no answer."""
    asked = body | {"stream": stream}
    told = http.post(path, asked).body
    code, out, err = verify(asked, told)
    assert (code, err) == (0, "")
    assert "identical" in out
    lines = told.strip().split(b"\n")
    last = json.loads(lines[-1])
    last["eval_count"] += 1
    assert verify(asked, b"\n".join([*lines[:-1], json.dumps(last).encode()]))[0] == 1
    if stream:
        assert verify(asked, b"\n".join(lines[:-1]))[0] != 0
        return
    changed = json.loads(told)
    if name == "message":
        changed["message"]["content"] += "x"
    else:
        changed["response"] += "x"
    code, out, _ = verify(asked, changed)
    assert code == 1
    assert out.startswith(name) or name in out
