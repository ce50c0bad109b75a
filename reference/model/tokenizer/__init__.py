"""Text to token ids and back, from the vocabulary stored in a GGUF file."""

from __future__ import annotations

from reference.model.tokenizer.load import load_tokenizer
from reference.model.tokenizer.tokenizer import Tokenizer
from reference.model.tokenizer.vocabulary import TokenKind, Vocabulary

__all__ = ["TokenKind", "Tokenizer", "Vocabulary", "load_tokenizer"]
