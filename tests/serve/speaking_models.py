"""Tiny models that are told what real ones are: by the chat template of a family, and its marks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.synth.sizes import sized_spec
from harness.synth.vocabulary import TOKENS_KEY, TYPES_KEY, own_tokenizer
from harness.synth.write import write_synthetic
from reference.model.gguf.writer import write_gguf
from reference.model.tokenizer import TokenKind
from tests.needs import need_file
from tests.paths import CHAT_TEMPLATES

MARKS = {
    "Qwen-Qwen3-0.6B": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "Qwen3.5-4B": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "google-gemma-4-31B-it": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
}
"""Tokens of a family that are written as text, by the name of its template."""
HERMES = "Qwen-Qwen3-0.6B"
CONTEXT = 2048


def speaking_model(folder: Path, family: str) -> Path:
    """A two-layer Qwen 3 with a byte-level vocabulary, and template and marks of a family."""
    template = need_file(CHAT_TEMPLATES / f"{family}.jinja").read_text()
    return templated_model(folder, family, template, MARKS[family])


def templated_model(
    folder: Path,
    name: str,
    template: str,
    marks: Sequence[str] = (),
    kind: TokenKind = TokenKind.USER_DEFINED,
    **keys: object,
) -> Path:
    """The same with any template, marks that are tokens of their own, and further keys."""
    spec = sized_spec("tiny", architecture="qwen3", quant="q4_k_m", context=CONTEXT)
    keys = own_tokenizer(spec) | keys
    tokens, kinds = list(keys[TOKENS_KEY]), np.array(keys[TYPES_KEY])
    unused = [n for n, kind in enumerate(kinds) if kind == TokenKind.UNUSED]
    for token, mark in zip(unused, marks, strict=False):
        tokens[token], kinds[token] = mark.encode(), kind
    keys |= {TOKENS_KEY: tokens, TYPES_KEY: kinds, "tokenizer.chat_template": template}
    vocabulary = folder / f"{name}.vocab.gguf"
    write_gguf(vocabulary, keys, {})
    path = folder / f"{name}.gguf"
    write_synthetic(path, spec, tokenizer_from=vocabulary)
    return path
