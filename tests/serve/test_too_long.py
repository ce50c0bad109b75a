"""A text or conversation longer than the context: the refusal names the field that was sent."""

import re
from typing import Any

import pytest

from tests.serve.http import Http

LONG, HUGE = "abcdefgh" * 1000, "a" * 200_000
"""More tokens than the context, and more bytes than a context of the longest tokens."""
CODE = "context_length_exceeded"
SAYS = ": prompt is too long: "
"""What litellm, langchain and agents search messages for, to shorten a conversation."""


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def asked(text: str) -> list[tuple[str, dict[str, Any], str]]:
    """Routes with requests for an answer about a text, and the fields that hold it."""
    chat = {"messages": turns(text)}
    return [
        ("/v1/chat/completions", chat, "messages"),
        ("/v1/chat/completions", chat | {"stream": True}, "messages"),
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/completion", {"prompt": text}, "prompt"),
        ("/completion", {"prompt": [97, text]}, "prompt"),
        ("/v1/responses", {"input": text}, "input"),
        ("/v1/responses", {"input": turns(text), "stream": True}, "input"),
        ("/v1/messages", chat | {"model": "tiny", "max_tokens": 4}, "messages"),
        ("/api/chat", chat | {"model": "tiny"}, "messages"),
        ("/api/generate", {"model": "tiny", "prompt": text}, "prompt"),
        ("/api/generate", {"model": "tiny", "prompt": text, "raw": True}, "prompt"),
        ("/v1/embeddings", {"input": text}, "input"),
        ("/v1/embeddings", {"input": ["a", text]}, "input"),
        ("/api/embed", {"model": "tiny", "input": text}, "input"),
        ("/api/embeddings", {"model": "tiny", "prompt": text}, "prompt"),
        ("/v1/score", {"input": text}, "input"),
        ("/v1/score", {"input": ["a", text]}, "input"),
    ]


COUNTED = [
    ("/tokenize", {"messages": turns(HUGE)}, "messages"),
    ("/tokenize", {"prompt": HUGE}, "prompt"),
    ("/tokenize", {"content": HUGE}, "content"),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": turns(HUGE)}, "messages"),
    ("/v1/responses/input_tokens", {"input": HUGE}, "input"),
]
"""The same of routes that only count."""


@pytest.mark.parametrize("text", [LONG, HUGE], ids=["tokens", "bytes"])
def test_the_field_that_was_sent_is_named(hermes, text):
    problems = []
    for path, body, field in [*asked(text), *(COUNTED if text is HUGE else ())]:
        reply = Http(hermes.url).post(path, body)
        error = reply.json.get("error", "nothing refused")
        told = {"message": error} if isinstance(error, str) else error
        found = (
            re.split(r"\W", told["message"])[0],
            told.get("param", field),
            told.get("code", CODE),
        )
        if (reply.status, *found) != (400, field, field, CODE) or SAYS not in told["message"]:
            problems.append((path, list(body), reply.status, *found, told["message"][:90]))
    assert not problems, "\n".join(map(str, problems))
