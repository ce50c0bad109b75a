"""Encoders of ordinary text: byte-level BPE, BPE over raw UTF-8, and SentencePiece.

Merging yields only normal tokens. Control, unknown, byte and user-defined tokens come from their
literal text or from a byte fallback, never from two pieces of user text that happen to spell them.
"""

from __future__ import annotations

import re
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

from reference.model.gguf.string_index import StringIndex
from reference.model.gguf.strings import StringArray
from reference.model.tokenizer.byte_alphabet import SYMBOL_OF_BYTE, from_byte_alphabet
from reference.model.tokenizer.pre_tokenizers import PreTokenizer
from reference.model.tokenizer.vocabulary import TokenKind, Vocabulary

SPACE = "\u2581"
"""The character for a space in SentencePiece and Gemma vocabularies."""

WORD_CHARACTERS, MAX_WORDS = 16, 16_384
"""The ids of the latest pieces of text are cached: at most this many characters each, and this many
pieces."""


class TextEncoder(Protocol):
    """One tokenizer model: encodes text without special tokens, decodes normal tokens."""

    def normalized(self, text: str) -> str:
        """``text`` as the family's tokenizer rewrites it before it encodes it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is left as it is. A byte for which the vocabulary has neither a
        token nor one that stands for unknown text is dropped."""

    def decode_normal(self, stored: bytes) -> bytes: ...


class _TokenTable:
    """Normal tokens by text, and the fallback for a symbol that is none of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.texts
        # Of tokens with equal text the last one counts, as in llama.cpp.
        self.ids = StringIndex(texts, int, vocabulary.ids_of_kind(TokenKind.NORMAL))
        self._unknown = vocabulary.unknown_text_id
        byte_texts = {b"<0x%02X>" % byte: byte for byte in range(256)}
        self._id_of_byte: dict[int, int] = {
            byte_texts[texts[token]]: token
            for token in vocabulary.ids_of_kind(TokenKind.BYTE).tolist()
            if texts[token] in byte_texts
        }

    def append_symbol(self, symbol: bytes, output: list[int]) -> None:
        token = self.ids.get(symbol)
        if token is not None:
            output.append(token)
        else:
            for byte in symbol:
                self._append(self._id_of_byte.get(byte), output)

    def append_letters(self, symbol: bytes, output: list[int]) -> None:
        """``append_symbol`` for the byte alphabet, in which every letter is one byte."""
        token = self.ids.get(symbol)
        if token is not None:
            output.append(token)
            return
        for byte in from_byte_alphabet(symbol):
            self._append(self.ids.get(SYMBOL_OF_BYTE[byte]), output)

    def _append(self, token: int | None, output: list[int]) -> None:
        """One byte's token, or the unknown one, or nothing."""
        token = self._unknown if token is None else token
        if token is not None:
            output.append(token)


def _ranks(merges: StringArray) -> StringIndex[int]:
    """The rank of each "left right"; of equal merges the first counts.

    The stored string is the key: symbols contain no space, so no other pair can spell it."""
    return StringIndex(merges, int, first=True)


class _Encoder:
    """The base of all encoders. Its tables are built when the first text is encoded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def _table(self) -> _TokenTable:
        return _TokenTable(self._vocabulary)

    def normalized(self, text: str) -> str:
        return text

    def decode_normal(self, stored: bytes) -> bytes:
        return stored.replace(SPACE.encode(), b" ")


class ByteLevelEncoder(_Encoder):
    """``gpt2``: split by a pre-tokenizer, write bytes in the byte alphabet, merge by rank."""

    def __init__(
        self, vocabulary: Vocabulary, merges: StringArray, pre_tokenizer: PreTokenizer
    ) -> None:
        super().__init__(vocabulary)
        self._merges = merges
        self._pre_tokenizer = pre_tokenizer
        self._known: dict[str, list[int]] = {}

    @cached_property
    def _rank_of_pair(self) -> StringIndex[int]:
        return _ranks(self._merges)

    def normalized(self, text: str) -> str:
        return self._pre_tokenizer.normalized(text)

    def encode(self, text: str) -> list[int]:
        output: list[int] = []
        for piece in self._pre_tokenizer.split(text):
            ids = self._known.get(piece)
            if ids is None:
                ids = self._ids_of(piece)
                if len(piece) <= WORD_CHARACTERS:
                    if len(self._known) >= MAX_WORDS:
                        self._known.clear()
                    self._known[piece] = ids
            output += ids
        return output

    def _ids_of(self, piece: str) -> list[int]:
        table, output = self._table, list[int]()
        symbols = [SYMBOL_OF_BYTE[byte] for byte in piece.encode()]
        if self._pre_tokenizer.whole_piece_first:
            token = table.ids.get(b"".join(symbols))
            if token is not None:
                return [token]
        for symbol in merge_pairs(symbols, self._rank_of_pair, b" "):
            table.append_letters(symbol, output)
        return output

    def decode_normal(self, stored: bytes) -> bytes:
        return from_byte_alphabet(stored)


class RawBPEEncoder(_Encoder):
    """``gemma4``: spaces become U+2581, lines are merged by rank over raw UTF-8."""

    _LINES = re.compile(r"[^\n]+|\n+")

    def __init__(self, vocabulary: Vocabulary, merges: StringArray) -> None:
        super().__init__(vocabulary)
        self._merges = merges

    @cached_property
    def _rank_of_pair(self) -> StringIndex[int]:
        return _ranks(self._merges)

    def encode(self, text: str) -> list[int]:
        table, ranks = self._table, self._rank_of_pair
        output: list[int] = []
        for line in self._LINES.findall(text.replace(" ", SPACE)):
            whole = table.ids.get(line.encode()) if line[0] == "\n" else None
            if whole is not None:
                output.append(whole)
                continue
            for symbol in merge_pairs([letter.encode() for letter in line], ranks, b" "):
                table.append_symbol(symbol, output)
        return output


class SentencePieceEncoder(_Encoder):
    """``llama``: spaces become U+2581, pairs that spell a token merge by highest score.

    ``scores`` is float32 [V], finite."""

    def __init__(self, vocabulary: Vocabulary, scores: np.ndarray) -> None:
        super().__init__(vocabulary)
        self._scores = scores

    @cached_property
    def _worth(self) -> StringIndex[float]:
        """The priority of a merge: the negated score of the token it spells."""
        normal = self._vocabulary.ids_of_kind(TokenKind.NORMAL)
        return StringIndex(self._vocabulary.texts, lambda id_: -float(self._scores[id_]), normal)

    def encode(self, text: str) -> list[int]:
        symbols = [letter.encode() for letter in text.replace(" ", SPACE)]
        output: list[int] = []
        for symbol in merge_pairs(symbols, self._worth, b""):
            self._table.append_symbol(symbol, output)
        return output


class Priorities(Protocol):
    """The priorities of pairs of symbols, by their text."""

    def get(self, text: bytes, /) -> float | None:
        """The priority of a pair, None for a pair that does not merge."""


def merge_pairs(symbols: list[bytes], priorities: Priorities, separator: bytes) -> list[bytes]:
    """Merge adjacent symbols until no adjacent pair has a priority.

    The next pair to merge is the one with the lowest ``priorities[left + separator + right]``, the
    leftmost of equals (Sennrich et al. 2016). Symbols are not empty. A linked list of symbols and a
    heap of candidate pairs make n symbols cost O(n log n) for any merges."""
    texts = list(symbols)
    count = len(symbols)
    if count < 2:
        return symbols
    following = list(range(1, count + 1))
    preceding = list(range(-1, count - 1))
    priority_of = priorities.get

    candidates = []
    for left in range(count - 1):
        priority = priority_of(symbols[left] + separator + symbols[left + 1])
        if priority is not None:
            size = len(symbols[left]) + len(symbols[left + 1])
            candidates.append((priority, left, left + 1, size))
    heapify(candidates)

    while candidates:
        _, left, right, size = heappop(candidates)
        left_text, right_text = texts[left], texts[right]
        # The size of a pair has changed if one of its symbols was merged since.
        if not left_text or not right_text or len(left_text) + len(right_text) != size:
            continue
        merged = left_text + right_text
        texts[left] = merged
        texts[right] = b""
        after = following[right]
        following[left] = after
        if after < count:
            preceding[after] = left
            after_text = texts[after]
            priority = priority_of(merged + separator + after_text)
            if priority is not None:
                heappush(candidates, (priority, left, after, size + len(after_text)))
        before = preceding[left]
        if before >= 0:
            before_text = texts[before]
            priority = priority_of(before_text + separator + merged)
            if priority is not None:
                heappush(candidates, (priority, before, left, len(before_text) + size))
    return [text for text in texts if text]
