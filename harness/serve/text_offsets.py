"""Where the tokens of a completion begin in its text: OpenAI's ``text_offset``.

Offsets count characters. A token that begins within a character, as those of byte pairs do, is
where that character is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

_DECODER = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """The offsets of tokens that come one after the other, after ``start`` characters."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = _DECODER(errors="replace")
        self._characters = start

    def of(self, token_bytes: bytes) -> int:
        """Where the next token begins, whose bytes these are."""
        begins = self._characters + self._ends_character(token_bytes)
        self._characters += len(self._decoder.decode(token_bytes))
        return begins

    def _ends_character(self, token_bytes: bytes) -> bool:
        """Whether bytes end a character that was begun by not being a part of it."""
        begun = self._decoder.getstate()[0]
        if not begun or not token_bytes:
            return False
        try:
            _DECODER(errors="strict").decode(begun + token_bytes[:1])
        except UnicodeDecodeError:
            return True
        return False


def prompt_offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Where the tokens of a prompt begin in its ``text``: what they say before it, as a token that
    was put in front or the blank that some vocabularies begin with, is at 0."""
    tokens = list(tokens)
    said = b"".join(tokens).decode(errors="replace")
    before = len(said) - len(text) if said.endswith(text) else 0
    offsets = TextOffsets()
    return [min(max(0, offsets.of(token) - before), len(text)) for token in tokens]
