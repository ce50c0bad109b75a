"""Loads a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.gguf.strings import StringArray
from reference.model.tokenizer import encoders
from reference.model.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from reference.model.tokenizer.tokenizer import Tokenizer
from reference.model.tokenizer.vocabulary import INFILL_TEXTS, TokenKind, Vocabulary

PREFIX = "tokenizer.ggml."
MODELS = ("gemma4", "gpt2", "llama")
NAMED_IDS = ("bos", "eos", "eot", "eom", "unknown", "fim_pad", "fim_rep", "fim_sep", *INFILL_TEXTS)
SHOWN_IDS = ("padding", "seperator", "separator", "cls", "mask")
"""Ids that only templates ask for, so that a wrong one is none. Files spell one both ways."""
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids a ``llama`` vocabulary has when its file does not name them."""
MAX_TOKENS = 1 << 24
"""Most tokens of a vocabulary."""


def load_tokenizer(metadata: Mapping[str, object], source: str) -> Tokenizer:
    """Load the tokenizer of a file's ``tokenizer.ggml.*`` keys.

    String arrays may hold bytes or str. ``source`` names the file in errors. Raises ModelFileError
    for keys that are missing or contradict each other and UnsupportedModel for an unknown tokenizer
    model or pre-tokenizer."""
    return _TokenizerReader(metadata, source).tokenizer()


class _TokenizerReader:
    """Typed access to the tokenizer keys of one file."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def tokenizer(self) -> Tokenizer:
        model = self._text("model")
        if model not in MODELS:
            raise self._unsupported("model", model, MODELS)
        tokens = self._strings("tokens")
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise self._error("tokens", f"{len(tokens)} tokens, expected 1 to {MAX_TOKENS:,}")
        named_ids = self._named_ids(model, len(tokens))
        vocabulary = Vocabulary(tokens, self._kinds(len(tokens)), named_ids)
        pre_tokenizer = self._pre_tokenizer() if model == "gpt2" else None
        add_bos = self._add_bos(model, pre_tokenizer)
        if add_bos and "bos" not in named_ids:
            raise self._error("bos_token_id", "missing, but every prompt is to start with BOS")
        return Tokenizer(
            vocabulary,
            self._encoder(model, vocabulary, pre_tokenizer),
            add_bos=add_bos,
            add_space_prefix=model == "llama" and self._flag("add_space_prefix", True),
            suppress_tokens=self._suppress_tokens(len(tokens)),
        )

    def _encoder(
        self, model: str, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer | None
    ) -> encoders.TextEncoder:
        if model == "llama":
            return encoders.SentencePieceEncoder(vocabulary, self._scores(len(vocabulary)))
        if PREFIX + "scores" in self._metadata:
            self._scores(len(vocabulary))
        merges = self._strings("merges")
        if pre_tokenizer is None:
            return encoders.RawBPEEncoder(vocabulary, merges)
        return encoders.ByteLevelEncoder(vocabulary, merges, pre_tokenizer)

    def _scores(self, vocab_size: int) -> np.ndarray:
        scores = self._numbers("scores", np.float32, vocab_size)
        if not np.isfinite(scores).all():
            raise self._error("scores", "holds a value that is not finite")
        return scores

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._text("pre")
        if name not in PRE_TOKENIZERS:
            raise self._unsupported("pre", name, sorted(PRE_TOKENIZERS))
        return PRE_TOKENIZERS[name]

    def _add_bos(self, model: str, pre_tokenizer: PreTokenizer | None) -> bool:
        if model == "gemma4":
            return True
        default = pre_tokenizer.add_bos if pre_tokenizer is not None else True
        return self._flag("add_bos_token", default)

    def _named_ids(self, model: str, vocab_size: int) -> dict[str, int]:
        named = {}
        if model == "llama":
            named = {name: id_ for name, id_ in SENTENCEPIECE_IDS.items() if id_ < vocab_size}
        for name in (*NAMED_IDS, *SHOWN_IDS):
            key = f"{name}_token_id"
            value = self._metadata.get(PREFIX + key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise self._error(key, f"expected an integer, found {type(value).__name__}")
            if not 0 <= value < vocab_size:
                if name in SHOWN_IDS:
                    continue
                raise self._error(key, f"{value} is not an id of the {vocab_size} tokens")
            named[name] = int(value)
        return named

    def _kinds(self, vocab_size: int) -> np.ndarray | None:
        if PREFIX + "token_type" not in self._metadata:
            return None
        kinds = self._numbers("token_type", np.int64, vocab_size)
        if kinds.min() < 0 or kinds.max() > max(TokenKind):
            bad = int(np.flatnonzero((kinds < 0) | (kinds > max(TokenKind)))[0])
            raise self._error("token_type", f"token {bad} has unknown type {kinds[bad]}")
        return np.where(kinds == 0, TokenKind.NORMAL, kinds).astype(np.uint8)

    def _suppress_tokens(self, vocab_size: int) -> list[int]:
        if PREFIX + "suppress_tokens" not in self._metadata:
            return []
        ids = self._numbers("suppress_tokens", np.int64, None)
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            raise self._error("suppress_tokens", f"names an id outside the {vocab_size} tokens")
        return [int(token) for token in ids]

    def _text(self, key: str) -> str:
        value = self._value(key)
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        if not isinstance(value, str):
            raise self._error(key, f"expected a string, found {type(value).__name__}")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise self._error(key, f"expected true or false, found {type(value).__name__}")
        return bool(value)

    def _strings(self, key: str) -> StringArray:
        value = self._value(key)
        if isinstance(value, StringArray):
            return value
        if (
            isinstance(value, (str, bytes))
            or not isinstance(value, Sequence)
            or (len(value) and not isinstance(value[0], (str, bytes)))
        ):
            raise self._error(key, "expected an array of strings")
        return StringArray.of([s.encode() if isinstance(s, str) else s for s in value])

    def _numbers(self, key: str, dtype: type, count: int | None) -> np.ndarray:
        value = self._value(key)
        try:
            numbers: np.ndarray = np.asarray(value, dtype)
        except (TypeError, ValueError, OverflowError):
            raise self._error(key, "expected an array of numbers") from None
        if numbers.ndim != 1 or (count is not None and len(numbers) != count):
            length = len(numbers) if numbers.ndim else "no"
            raise self._error(key, f"{length} values for {count} tokens")
        return numbers

    def _value(self, key: str) -> object:
        if PREFIX + key not in self._metadata:
            raise self._error(key, "missing", "convert the model again with its tokenizer")
        return self._metadata[PREFIX + key]

    def _error(self, key: str, problem: str, remedy: str = "") -> ModelFileError:
        return ModelFileError(self._source, PREFIX + key, problem, remedy)

    def _unsupported(self, key: str, value: str, known: Sequence[str]) -> UnsupportedModel:
        problem = f"{value!r} is not supported"
        return UnsupportedModel(self._source, PREFIX + key, problem, f"known: {', '.join(known)}")
