"""Tokens with their texts, for the server and the command line."""

from __future__ import annotations

from collections.abc import Iterable

from reference.model.tokenizer import Tokenizer


def token_pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[dict[str, object]]:
    """Each token id with its text, or with its bytes if they are not UTF-8."""
    return [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    raw = tokenizer.token_bytes(token, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
