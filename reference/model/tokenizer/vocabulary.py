"""The token table of a model file: the kind of each id, and the ids that end a generation."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from contract.arrays import Ints
from contract.errors import RequestError
from reference.model.gguf.strings import StringArray


class TokenKind(IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


TOOL_RESPONSE = b"<|tool_response>"
SENTENCE_END = b"</s>"
MESSAGE_END = b"<|end|>"
ANSWER_ENDS = (b"<|return|>", b"<|call|>")

END_TEXTS = frozenset(
    text.encode()
    for text in (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>",
        "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>",
        "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
        "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|eot|>", "<|eom|>", "<|role_end|>",
    )
)  # fmt: skip
"""Texts of tokens that end a generation whatever ids the file names: llama.cpp's list, and the ends
of Llama 4's messages and of Ling 2's turns."""

FIM_TEXTS: dict[str, tuple[bytes, ...]] = {
    "fim_pad": (b"<|fim_pad|>", b"<fim-pad>", b"<fim_pad>", b"<PAD>"),
    "fim_rep": (b"<|fim_repo|>", b"<|repo_name|>", b"<fim-repo>", b"<REPO>", b"<reponame>"),
    "fim_sep": (b"<|file_sep|>",),
}
"""Texts of fill-in-the-middle tokens, used when the file gives no id."""

INFILL_TEXTS: dict[str, tuple[bytes, ...]] = {
    "fim_pre": (
        b"<|fim_prefix|>", b"<fim-prefix>", b"<fim_prefix>", b"<PRE>", b"\xe2\x96\x81<PRE>",
        b"<|code_prefix|>", b"<|prefix|>",
        b"<\xef\xbd\x9cfim\xe2\x96\x81begin\xef\xbd\x9c>",
    ),
    "fim_suf": (
        b"<|fim_suffix|>", b"<fim-suffix>", b"<fim_suffix>", b"<SUF>", b"\xe2\x96\x81<SUF>",
        b"<|code_suffix|>", b"<|suffix|>",
        b"<\xef\xbd\x9cfim\xe2\x96\x81hole\xef\xbd\x9c>",
    ),
    "fim_mid": (
        b"<|fim_middle|>", b"<fim-middle>", b"<fim_middle>", b"<MID>", b"\xe2\x96\x81<MID>",
        b"<|code_middle|>", b"<|middle|>",
        b"<\xef\xbd\x9cfim\xe2\x96\x81end\xef\xbd\x9c>",
    ),
}  # fmt: skip
"""Texts of the tokens before a prefix, before a suffix and before the text between them, used when
the file gives no id; the list is llama.cpp's."""


class InfillIds(NamedTuple):
    """The tokens before a prefix, before a suffix and before the text between them, and that before
    the name of another file, if there is one."""

    prefix: int
    suffix: int
    middle: int
    file: int | None = None


class Vocabulary:
    """Stored token texts and kinds.

    ``tokens`` has V entries, ``kinds`` is int [V] (None: all normal), ``named_ids`` holds the ids
    the file declares under names such as "eos" and "fim_pad". No Python object is made per token.
    """

    def __init__(
        self, tokens: StringArray, kinds: np.ndarray | None, named_ids: dict[str, int]
    ) -> None:
        self.texts = tokens
        """Every stored text, in id order."""
        self._kinds = kinds
        self.named_ids = named_ids

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, token: int) -> bytes:
        """The stored text of an id; raises RequestError when there is no such id."""
        if not 0 <= token < len(self.texts):
            raise RequestError("token", f"{token} is not in 0..{len(self.texts) - 1}")
        return self.texts[token]

    def kind(self, token: int) -> TokenKind:
        """The kind of an id. A token that ends generations because of its text counts as
        control."""
        if token in self._end_and_fim_ids:
            return TokenKind.CONTROL
        if self._kinds is None:
            return TokenKind.NORMAL
        return TokenKind(int(self._kinds[token]))

    def ids_of_kind(self, *kinds: TokenKind) -> Ints:
        """Every id that is one of ``kinds``, in increasing order."""
        if self._kinds is None:
            actual = np.full(len(self), TokenKind.NORMAL, np.uint8)
        else:
            actual = self._kinds.astype(np.uint8)
        actual[list(self._end_and_fim_ids)] = TokenKind.CONTROL
        return np.flatnonzero(np.isin(actual, kinds)).astype(np.int32)

    @property
    def unknown_text_id(self) -> int | None:
        """The id that stands for text the vocabulary has no token for, None if there is none.

        Files name a control token here that no text may become: it is not one."""
        token = self.named_ids.get("unknown")
        if token is None or token in self.end_ids or token == self.named_ids.get("bos"):
            return None
        return None if self.kind(token) is TokenKind.CONTROL else token

    @cached_property
    def infill_ids(self) -> InfillIds | None:
        """The tokens of text between two others; None if one is missing."""
        named = {**INFILL_TEXTS, "fim_sep": FIM_TEXTS["fim_sep"]}
        texts = frozenset(text for known in named.values() for text in known)
        found = {text: token for token, text in self.texts.occurrences(texts)}
        prefix, suffix, middle, file = (
            self.named_ids.get(name, next((found[text] for text in known if text in found), None))
            for name, known in named.items()
        )
        if prefix is None or suffix is None or middle is None:
            return None
        return InfillIds(prefix, suffix, middle, file)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a generation."""
        named = ("eos", "eot", "eom", *FIM_TEXTS)
        return self._end_and_fim_ids | {
            self.named_ids[name] for name in named if name in self.named_ids
        }

    @cached_property
    def _end_and_fim_ids(self) -> frozenset[int]:
        """The end and fill-in-the-middle ids found by text. With ``<|tool_response>`` (Gemma 4),
        ``</s>`` is ordinary text. With both of ANSWER_ENDS (gpt-oss), ``<|end|>`` only ends a
        message of several."""
        fim_texts = {
            text
            for name, texts in FIM_TEXTS.items()
            if name not in self.named_ids
            for text in texts
        }
        requested = END_TEXTS | fim_texts
        found = {text: token for token, text in self.texts.occurrences(requested)}
        if TOOL_RESPONSE in found:
            found.pop(SENTENCE_END, None)
        if all(text in found for text in ANSWER_ENDS):
            found.pop(MESSAGE_END, None)
        return frozenset(found.values())
