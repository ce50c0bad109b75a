"""Vocabularies for tokenizer tests: small ones made here, whole ones from the shared data."""

from pathlib import Path

from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import Tokenizer, TokenKind, load_tokenizer
from reference.model.tokenizer.byte_alphabet import LETTER_OF_BYTE
from tests.needs import need_file
from tests.paths import VOCAB

SHARED_VOCABULARIES = ("gemma-4", "llama-bpe", "llama-spm", "qwen35")


def shared_vocabulary_path(name: str) -> Path:
    """Path of a shared vocabulary, see ``need_file``."""
    return need_file(VOCAB / f"ggml-vocab-{name}.gguf")


def shared_tokenizer(name: str) -> Tokenizer:
    path = shared_vocabulary_path(name)
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata, str(path))
        tokenizer.encode("a")
    return tokenizer


def byte_level_metadata(
    merges: list[str], control: list[str], user_defined: list[str] = (), pre: str = "qwen2"
) -> dict[str, object]:
    """A ``gpt2`` vocabulary: 256 bytes, the results of ``merges``, then special tokens."""
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*LETTER_OF_BYTE, *merged, *control, *user_defined]
    kinds = [
        *[TokenKind.NORMAL] * (256 + len(merged)),
        *[TokenKind.CONTROL] * len(control),
        *[TokenKind.USER_DEFINED] * len(user_defined),
    ]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds], "tokenizer.ggml.merges": merges,
    }  # fmt: skip


def sentencepiece_metadata(scored: dict[str, float]) -> dict[str, object]:
    """A ``llama`` vocabulary: unk, bos, eos, 256 bytes, then ``scored`` pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(scored)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scored.values()),
        "tokenizer.ggml.token_type": kinds,
    }
