"""Mistral's tekken vocabularies, as a converter writes them, against Mistral's own tokenizer."""

import base64
import importlib.resources
import json
from functools import cache
from typing import Any

import pytest

from reference.model.tokenizer import Tokenizer, TokenKind, load_tokenizer
from reference.model.tokenizer.byte_alphabet import LETTER_OF_BYTE
from tests.needs import need_installed, need_module
from tests.peer.texts import varied_texts

VOCABULARIES = ("tekken_240718", "tekken_240911")
SPECIAL_TOKENS = 1000
"""Ids of control tokens, which come before all others."""


@cache
def contents(name: str) -> dict[str, Any]:
    need_installed("mistral_common", "test")
    file = importlib.resources.files("mistral_common") / "data" / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@cache
def ranks(name: str) -> dict[bytes, int]:
    """The bytes of every normal token and its rank, as many as the vocabulary uses."""
    stored = contents(name)
    count = stored["config"]["default_vocab_size"] - SPECIAL_TOKENS
    return {
        base64.b64decode(entry["token_bytes"]): n for n, entry in enumerate(stored["vocab"][:count])
    }


def letters(token: bytes) -> str:
    return "".join(LETTER_OF_BYTE[byte] for byte in token)


def merges(ranked: dict[bytes, int]) -> list[str]:
    """For each token, in order, every way to make it of two tokens, lower ranks first."""
    made = []
    for token in ranked:
        if len(token) > 1:
            cuts = ((token[:n], token[n:]) for n in range(1, len(token)))
            known = [pair for pair in cuts if pair[0] in ranked and pair[1] in ranked]
            known.sort(key=lambda pair: (ranked[pair[0]], ranked[pair[1]]))
            made += [" ".join(map(letters, pair)) for pair in known]
    return made


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocabulary(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(vocabulary) -> Tokenizer:
    ranked = ranks(vocabulary)
    control = [f"<control_{n}>" for n in range(SPECIAL_TOKENS)]
    kinds = [TokenKind.CONTROL] * SPECIAL_TOKENS + [TokenKind.NORMAL] * len(ranked)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": [*control, *map(letters, ranked)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges(ranked),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return load_tokenizer(metadata, vocabulary)


def test_every_text_has_mistrals_ids(ours, vocabulary):
    """Text of many scripts, numbers, spaces and marks, in and out of normal form."""
    tiktoken = need_module("tiktoken", "test")
    theirs = tiktoken.Encoding(
        name=vocabulary,
        pat_str=contents(vocabulary)["config"]["pattern"],
        mergeable_ranks=ranks(vocabulary),
        special_tokens={},
    )
    texts = [*varied_texts(), "ÉTÉ Été déjàVu", "ǅ ǈ ǋ", "日本語テスト ไทย हिन्दी"]
    for text in texts:
        expected = [SPECIAL_TOKENS + n for n in theirs.encode(text, disallowed_special=())]
        assert ours.encode(text, add_bos=False) == expected, text
    assert ours.encode("a")[0] == 1
