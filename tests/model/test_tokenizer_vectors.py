"""Agreement with llama.cpp's stored cases and with the tokenizers package, id for id."""

import unicodedata
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import Tokenizer, TokenKind
from reference.model.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tests.model.tokenizer_data import SHARED_VOCABULARIES, shared_tokenizer, shared_vocabulary_path

CASE_SEPARATOR = b"\n__ggml_vocab_test__\n"

shared = cache(shared_tokenizer)


@pytest.mark.parametrize("name", SHARED_VOCABULARIES)
def test_every_stored_case_has_llama_cpps_ids(name):
    """llama.cpp normalizes nothing, so its ids are those of the text as it is."""
    path = shared_vocabulary_path(name)
    texts = path.with_name(path.name + ".inp").read_bytes().split(CASE_SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    if len(texts) == len(lines) + 1:
        assert texts.pop() == b""
    assert len(texts) == len(lines) > 40
    tokenizer = shared(name)
    for case, line in zip(texts, lines, strict=True):
        text, expected = case.decode(), [int(i) for i in line.split()]
        assert tokenizer.encode_exactly(text) == expected
        if name != "qwen35" or unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text, add_bos=False) == expected


@cache
def _oracle(name: str) -> tokenizers.Tokenizer:
    path = shared_vocabulary_path(name)
    with open_gguf(path) as file:
        metadata = file.metadata
        kinds = metadata["tokenizer.ggml.token_type"]
        texts = metadata["tokenizer.ggml.tokens"].to_list()
        merges = metadata["tokenizer.ggml.merges"].to_list()
        pre = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
        normal = {
            text.decode(): token
            for token, text in enumerate(texts)
            if kinds[token] == TokenKind.NORMAL
        }
    pairs = [tuple(merge.decode().split(" ")) for merge in merges]
    oracle = tokenizers.Tokenizer(
        tokenizers.models.BPE(normal, pairs, ignore_merges=pre.whole_piece_first)
    )
    if pre.nfc:
        oracle.normalizer = tokenizers.normalizers.NFC()
    [pattern] = pre.passes
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return oracle


def _assert_like_oracle(tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, text: str) -> None:
    expected = oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_bos=False) == expected


PROSE = st.lists(
    st.sampled_from(
        ["the", " quick", " Brown", "'s", "'LL", "n't", " 1234567", "\n\n", "  ", "\t", " !?", "é",
         "漢字", " привет", "🦙", "\u0301", " naïve", "http://x.y/z?a=b", "\r\n", "_", "    return"]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", ["llama-bpe", "qwen35"])
@settings(max_examples=150, deadline=None)
@given(text=PROSE)
def test_prose_encodes_as_the_tokenizers_package_does(name, text):
    _assert_like_oracle(shared(name), _oracle(name), text)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen35"])
@settings(max_examples=150, deadline=None)
# Characters both know: their Unicode tables are of different years.
@given(text=st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cs", "Cn"])))
def test_any_text_encodes_as_the_tokenizers_package_does(name, text):
    _assert_like_oracle(shared(name), _oracle(name), text)


@pytest.mark.parametrize("name", SHARED_VOCABULARIES)
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(), PROSE))
def test_decoding_gives_the_text_back(name, text):
    """U+2581 is left out: SentencePiece and Gemma vocabularies write a space that way."""
    text = text.replace("\u2581", "")
    tokenizer = shared(name)
    ids = tokenizer.encode(text)
    given_back = unicodedata.normalize("NFC", text) if name == "qwen35" else text
    assert tokenizer.decode_bytes(ids) == given_back.encode()
    assert ids == tokenizer.encode(text)


def test_decomposed_text_has_the_ids_of_composed_text_in_qwens_vocabulary():
    tokenizer = shared("qwen35")
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")
    assert tokenizer.encode("cafe\u0301") == [924, 58858]
    assert tokenizer.encode_exactly("cafe\u0301") == [924, 1859, 53839]


@pytest.mark.parametrize(
    ("name", "controls"),
    [
        ("gemma-4", ["<bos>", "<|turn>", "<turn|>", "<eos>", "<|tool_response>"]),
        ("llama-bpe", ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"]),
        ("llama-spm", ["<s>", "</s>", "<unk>", "<0x0A>"]),
        ("qwen35", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]),
    ],
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_user_text_never_yields_a_control_id(name, controls, data):
    """Even when it spells control tokens, whole or in part; and the text is not altered."""
    parts = [*controls, *(control[:-1] for control in controls), "<", ">", "|", "hi", " ", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    tokenizer = shared(name)
    ids = tokenizer.encode(text, add_bos=False)
    kinds = {tokenizer.kind(token) for token in ids}
    assert kinds <= {TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.BYTE}
    assert tokenizer.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gemma-4", "<|turn>user\nhi<turn|>", ["<bos>", "<|turn>", "user", "\n", "hi", "<turn|>"]),
        ("llama-bpe", "<|begin_of_text|>a<|eot_id|>", ["<|begin_of_text|>", "a", "<|eot_id|>"]),
        ("qwen35", "<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_control_tokens_are_parsed_on_request_and_bos_comes_once(name, text, expected):
    tokenizer = shared(name)
    ids = tokenizer.encode(text, parse_special=True)
    assert [tokenizer.token_text(token) for token in ids] == expected


@pytest.mark.parametrize(
    ("name", "end_texts"),
    [
        ("gemma-4", {"<eos>", "<turn|>", "<|tool_response>"}),
        ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
        ("llama-spm", {"</s>"}),
        ("qwen35", {"<|endoftext|>", "<|im_end|>", "</s>"}),
    ],
)
def test_tokens_that_end_a_generation(name, end_texts):
    tokenizer = shared(name)
    assert {tokenizer.token_text(token) for token in tokenizer.eog_ids} == end_texts
