"""Find the tokens of an answer's text, where thoughts come before it or calls after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Listed = dict[str, Any]


def tokens_of_text(text: str, listed: Sequence[Listed], thoughts: str = "") -> list[Listed]:
    """Those of ``listed`` tokens of an answer that have a byte of ``text``, which comes after its
    ``thoughts``; all of them where the text is not what the tokens say, as that of half a character
    is not."""
    whole = b"".join(bytes(one["bytes"]) for one in listed)
    begins = max(0, whole.find(thoughts.encode())) + len(thoughts.encode())
    start = whole.find(text.encode(), begins)
    if start < 0:
        return list(listed)
    found, at, end = [], 0, start + len(text.encode())
    for one in listed:
        after = at + len(one["bytes"])
        if at < end and after > start:
            found.append(one)
        at = after
    return found


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
