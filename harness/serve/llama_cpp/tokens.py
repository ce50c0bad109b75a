"""llama.cpp's forms of tokens in requests and answers."""

from __future__ import annotations

from collections.abc import Iterable

from harness.serve.answers import Json
from harness.serve.wire import TokenizeRequest
from reference.model.tokenizer import Tokenizer


def adds_bos(body: TokenizeRequest) -> bool:
    """Whether a BOS goes in front of a text: by default where it has vLLM's name."""
    for given in (body.add_special_tokens, body.add_special):
        if given is not None:
            return given
    return body.content is None


def token_pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[Json]:
    """Every token with its text, or with its bytes where they are no text."""
    return [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    raw = tokenizer.token_bytes(token, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
