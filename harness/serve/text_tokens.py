"""Finds the tokens of an answer's text among reasoning before it and calls after it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

UTF8 = getincrementaldecoder("utf-8")
Listed = dict[str, Any]


def tokens_of_text(text: str, listed: Sequence[Listed], reasoning: str = "") -> list[Listed]:
    """The ``listed`` tokens with at least one byte of ``text``, which comes after ``reasoning``; or
    all tokens with bytes, if the text is not made of the tokens."""
    shown = [one for one in listed if one["bytes"]]
    decoder = UTF8(errors="replace")
    whole, spans = "", []
    for number, one in enumerate(shown, 1):
        begin = len(whole)
        whole += decoder.decode(bytes(one["bytes"]), final=number == len(shown))
        spans.append((begin, len(whole) + bool(decoder.getstate()[0])))
    begins = max(0, whole.find(reasoning)) + len(reasoning)
    start = whole.find(text, begins)
    if start < 0:
        return shown
    end = start + len(text)
    return [
        one for one, (at, after) in zip(shown, spans, strict=True) if at < end and after > start
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
