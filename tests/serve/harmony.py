"""A tiny model of gpt-oss's architecture that speaks its format, by its chat template in short."""

from pathlib import Path

import numpy as np

from harness.host.dialect.harmony import HARMONY_MARKS
from harness.synth.sizes import sized_spec
from harness.synth.vocabulary import TOKENS_KEY, TYPES_KEY, own_tokenizer
from harness.synth.write import write_synthetic
from reference.model.gguf.writer import write_gguf
from reference.model.tokenizer import TokenKind
from tests.serve import chat_templates


def harmony_model(folder: Path) -> Path:
    """A two-layer model with a byte-level vocabulary, and the marks of the format as tokens."""
    spec = sized_spec("tiny", architecture="gpt-oss", quant="mxfp4_moe", context=2048)
    keys = own_tokenizer(spec)
    tokens, kinds = list(keys[TOKENS_KEY]), np.array(keys[TYPES_KEY])
    unused = [n for n, kind in enumerate(kinds) if kind == TokenKind.UNUSED]
    for token, mark in zip(unused, HARMONY_MARKS, strict=False):
        tokens[token], kinds[token] = mark.encode(), TokenKind.CONTROL
    keys |= {
        TOKENS_KEY: tokens,
        TYPES_KEY: kinds,
        "tokenizer.chat_template": chat_templates.HARMONY,
        "tokenizer.ggml.eos_token_id": tokens.index(b"<|return|>"),
    }
    vocabulary, path = folder / "vocabulary.gguf", folder / "gpt-oss.gguf"
    write_gguf(vocabulary, keys, {})
    write_synthetic(path, spec, tokenizer_from=vocabulary)
    return path
