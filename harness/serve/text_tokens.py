"""Finds the tokens of an answer's text, which stand between those of reasoning and of calls."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

UTF8 = getincrementaldecoder("utf-8")
Listed = dict[str, Any]


def tokens_of_text(text: str, listed: Sequence[Listed], reasoning: str = "") -> list[Listed]:
    """The ``listed`` tokens with at least one byte of ``text``, which comes after ``reasoning``.

    If the tokens' bytes do not contain ``text``, all tokens that have bytes."""
    visible = [token for token in listed if token["bytes"]]
    decoder = UTF8(errors="replace")
    whole, spans = "", []
    for number, token in enumerate(visible, 1):
        begin = len(whole)
        whole += decoder.decode(bytes(token["bytes"]), final=number == len(visible))
        # Bytes that wait for the rest of a character are part of the next character.
        spans.append((begin, len(whole) + bool(decoder.getstate()[0])))
    reasoning_end = max(0, whole.find(reasoning)) + len(reasoning)
    start = whole.find(text, reasoning_end)
    if start < 0:
        return visible
    end = start + len(text)
    return [
        token
        for token, (first, last) in zip(visible, spans, strict=True)
        if first < end and last > start
    ]


def response_logprobs(listed: Sequence[Listed]) -> list[Listed]:
    """Tokens as ``/v1/responses`` lists them."""
    return [
        {
            **{name: one[name] for name in ("token", "bytes", "logprob")},
            "top_logprobs": [
                {name: other[name] for name in ("token", "bytes", "logprob")}
                for other in one["top_logprobs"]
            ],
        }
        for one in listed
    ]
