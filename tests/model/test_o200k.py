"""OpenAI's pattern and control tokens of gpt-oss, by tiktoken, over Mistral's ranks.

tiktoken names its rank files by address and has none of them; the pattern does not depend on them.
"""

from typing import Any

import pytest

from reference.model.tokenizer import Tokenizer, TokenKind, load_tokenizer
from tests.model.test_tekken import letters, merges, ranks
from tests.needs import need_module
from tests.peer.texts import varied_texts

VOCABULARY = "tekken_240911"
RANKS = 20_000
"""The first so many ranks are a vocabulary of their own."""
TEXTS = (
    "ÉTÉ Été déjàVu", "ǅ ǈ ǋ", "日本語テスト ไทย हिन्दी", "it'ſ IT'LL we'Ve 'tis", "12345678 0001",
    "a/b//c\n\n/d", "\t \n  x", "naïveté’s", "x_1=y2;", "\u200bzero\u00a0width",
)  # fmt: skip


@pytest.fixture(scope="module")
def harmony() -> dict[str, Any]:
    """tiktoken's description of ``o200k_harmony`` over other ranks."""
    encodings = need_module("tiktoken_ext.openai_public", "test")
    few = {token: rank for token, rank in ranks(VOCABULARY).items() if rank < RANKS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "load_tiktoken_bpe", lambda *_, **__: few)
        described: dict[str, Any] = encodings.o200k_harmony()
    return described


@pytest.fixture(scope="module")
def ours(harmony) -> Tokenizer:
    """The vocabulary as a converter writes it: ranks, unused ids, control tokens at their ids."""
    ranked, control = harmony["mergeable_ranks"], harmony["special_tokens"]
    count = max(control.values()) + 1
    tokens = [*map(letters, ranked), *(f"[PAD{n}]" for n in range(len(ranked), count))]
    kinds = [TokenKind.NORMAL] * len(ranked) + [TokenKind.UNUSED] * (count - len(ranked))
    for text, token in control.items():
        tokens[token], kinds[token] = text, TokenKind.CONTROL
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges(ranked),
        "tokenizer.ggml.bos_token_id": control["<|startoftext|>"],
        "tokenizer.ggml.eos_token_id": control["<|return|>"],
    }
    return load_tokenizer(metadata, "o200k")


def test_every_text_has_tiktokens_ids(ours, harmony):
    tiktoken = need_module("tiktoken", "test")
    theirs = tiktoken.Encoding(**harmony)
    for text in [*varied_texts(), *TEXTS]:
        expected = theirs.encode(text, disallowed_special=())
        assert ours.encode(text, add_bos=False) == expected, text


def test_a_conversation_has_tiktokens_ids(ours, harmony):
    """Control tokens in a text that may hold them."""
    tiktoken = need_module("tiktoken", "test")
    text = (
        "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
        "<|call|>"
    )
    expected = tiktoken.Encoding(**harmony).encode(text, allowed_special="all")
    assert ours.encode(text, parse_special=True, add_bos=False) == expected


def test_the_end_of_a_message_ends_no_answer(ours, harmony):
    """Thoughts end with ``<|end|>``, and the answer follows."""
    control = harmony["special_tokens"]
    ends = {control[f"<|{name}|>"] for name in ("return", "call", "endoftext")}
    assert ends == set(ours.eog_ids)
