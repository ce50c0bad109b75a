"""Rules of encoding and decoding, on vocabularies small enough to read."""

import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import RequestError
from reference.model.tokenizer import TokenKind, encoders, load_tokenizer
from reference.model.tokenizer.encoders import merge_pairs
from reference.model.tokenizer.pre_tokenizers import PRE_TOKENIZERS, _compiled, _split
from reference.model.tokenizer.special_tokens import partition
from tests.model.tokenizer_data import byte_level_metadata, sentencepiece_metadata
from tests.tables import table


def _slow_merge(symbols: list[bytes], priorities: dict[bytes, float]) -> list[bytes]:
    """The definition: merge the leftmost pair of lowest priority until there is none."""
    symbols = list(symbols)
    while True:
        ranked = [
            (priorities[pair], i)
            for i in range(len(symbols) - 1)
            if (pair := symbols[i] + b" " + symbols[i + 1]) in priorities
        ]
        if not ranked:
            return symbols
        _, i = min(ranked)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


words = st.text("ab", min_size=1, max_size=4).map(str.encode)
pair_tables = st.dictionaries(st.tuples(words, words).map(b" ".join), st.integers(0, 5))


@settings(deadline=None)
@given(st.text("ab", max_size=20), pair_tables)
def test_merging_follows_its_definition(text, priorities):
    """For any table, including merges nothing leads to and equal priorities."""
    symbols = [letter.encode() for letter in text]
    assert merge_pairs(symbols, priorities, b" ") == _slow_merge(symbols, priorities)


def test_merging_a_hundred_thousand_equal_symbols():
    """Linear-logarithmic: a quadratic merge would not end within the test's time limit."""
    ranks = {b"a" * n + b" " + b"a" * n: i for i, n in enumerate([1, 2, 4, 8])}
    merged = merge_pairs([b"a"] * 100_000, ranks, b" ")
    assert merged == [b"a" * 16] * 6250


def test_kept_words_are_bounded_and_change_nothing(monkeypatch):
    """Few words are kept, none that is long, and each has its ids again however often it comes."""
    monkeypatch.setattr(encoders, "MAX_WORDS", 3)
    tokenizer = load_tokenizer(byte_level_metadata(["a b", "ab a"], []), "test")
    words = ["ab", "aba", "b" * encoders.WORD_CHARACTERS, "ba" * encoders.WORD_CHARACTERS, "bab"]
    for word in words * 3:
        alone = load_tokenizer(byte_level_metadata(["a b", "ab a"], []), "test")
        assert tokenizer.encode(word) == alone.encode(word)
        kept = tokenizer._encoder._known
        assert len(kept) <= 3
        assert (word in kept) == (len(word) <= encoders.WORD_CHARACTERS)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@settings(deadline=None)
@given(text=st.text())
def test_pre_tokenizers_lose_nothing(name, text):
    pieces = PRE_TOKENIZERS[name].split(text)
    assert "".join(pieces) == text
    assert all(pieces)


ASCII = [chr(code) for code in range(128)]
LIKELY = st.sampled_from([*ASCII, "'ll", "'S", "\r\n", "  ", "12", "Ab"])


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@settings(deadline=None)
@given(drawn=st.lists(LIKELY, max_size=12).map("".join))
def test_text_that_is_ascii_is_cut_as_any_text_is(name, drawn):
    """By the standard library's patterns and by those of the library that knows Unicode."""
    for pattern in PRE_TOKENIZERS[name].passes:
        plain, any_text = (_compiled(pattern, of_ascii) for of_ascii in (True, False))
        for text in (drawn, *ASCII):
            assert list(_split(plain, text)) == list(_split(any_text, text))


@pytest.mark.parametrize(
    ("name", "pieces"), table(__file__, "test_tokenizer_rules")["where_pre_tokenizers_cut"]
)
def test_where_pre_tokenizers_cut(name, pieces):
    assert PRE_TOKENIZERS[name].split("I'LL pay 1234   now!\n") == pieces


@pytest.mark.parametrize("name", ["gpt-4o", "tekken"])
def test_words_end_where_capitals_begin_again(name):
    assert PRE_TOKENIZERS[name].split("camelCaseÉtéHTTPServer") == [
        "camel", "Case", "Été", "HTTPServer",
    ]  # fmt: skip


def test_combining_marks_stay_in_the_word_for_qwen35_only():
    assert PRE_TOKENIZERS["qwen35"].split("re\u0301sume") == ["re\u0301sume"]
    assert PRE_TOKENIZERS["qwen2"].split("re\u0301sume") == ["re", "\u0301sume"]


def test_byte_level_merges_apply_inside_pieces():
    tokenizer = load_tokenizer(byte_level_metadata(["h e", "l l", "Ġ he", "o Ġ"], []), "m.gguf")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hello hell")] == [
        "he", "ll", "o", " he", "ll",
    ]  # fmt: skip


def test_a_whole_piece_that_is_a_token_needs_no_merges_for_llama3_only():
    metadata = byte_level_metadata(["x y"], [])
    metadata["tokenizer.ggml.tokens"][256] = "abc"
    assert load_tokenizer(metadata, "m.gguf").encode("abc") == [97, 98, 99]
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    tokenizer = load_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": False}, "m.gguf")
    assert tokenizer.encode("abc") == [256]


def test_sentencepiece_merges_the_highest_score_first():
    pieces = {"▁": -9.0, "a": -8.0, "b": -8.0, "ab": -2.0, "ba": -1.0, "▁a": -3.0}
    tokenizer = load_tokenizer(sentencepiece_metadata(pieces), "m.gguf")
    ids = tokenizer.encode("aba")
    assert [tokenizer.token_text(i) for i in ids] == ["<s>", " a", "ba"]
    assert tokenizer.decode_bytes(ids) == b"aba"


def test_sentencepiece_writes_unknown_characters_as_bytes():
    tokenizer = load_tokenizer(sentencepiece_metadata({"▁": -1.0}), "m.gguf")
    ids = tokenizer.encode("é", add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xa9"]


def test_sentencepiece_puts_a_space_after_every_special_token():
    tokenizer = load_tokenizer(sentencepiece_metadata({"▁": -1.0, "a": -1.0}), "m.gguf")
    ids = tokenizer.encode("a</s>a", parse_special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["<s>", " ", "a", "</s>", " ", "a"]
    assert tokenizer.encode("") == [tokenizer.bos_id]


def test_merging_never_spells_a_control_token():
    """A control token that merges lead to is out of reach of ordinary text."""
    metadata = byte_level_metadata(["< s", "<s >"], [])
    metadata["tokenizer.ggml.token_type"][257] = int(TokenKind.CONTROL)
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert 257 not in tokenizer.encode("<s>")
    assert tokenizer.decode_bytes(tokenizer.encode("<s>")) == b"<s>"
    assert tokenizer.encode("<s>", parse_special=True) == [257]


def test_user_defined_tokens_always_match_the_longest_first():
    metadata = byte_level_metadata([], ["<ctl>"], ["<think>", "<think>\n"])
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.encode("<think>\n<think>") == [258, 257]
    assert tokenizer.encode("<ctl>", parse_special=True) == [256]
    assert len(tokenizer.encode("<ctl>")) == 5
    assert tokenizer.token_bytes(256) == b""
    assert tokenizer.token_bytes(256, special=True) == b"<ctl>"
    assert tokenizer.token_bytes(257) == b"<think>"


def test_control_tokens_are_found_only_inside_one_span():
    specials = [("<ctl>", 7, True)]
    text = "<ctl><ctl>"
    assert partition(text, specials, [(0, 10)]) == [(0, 5, 7), (5, 10, 7)]
    assert partition(text, specials, [(5, 10)]) == [(0, 5, None), (5, 10, 7)]
    assert partition(text, specials, [(0, 4), (6, 10)]) == [(0, 10, None)]
    assert partition("", specials, []) == []


@settings(deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3, unique=True),
)
def test_partition_covers_the_text(text, literals):
    specials = [(literal, i, False) for i, literal in enumerate(sorted(literals, key=len))][::-1]
    fragments = partition(text, specials, [])
    assert "".join(text[start:end] for start, end, _ in fragments) == text
    for start, end, token in fragments:
        if token is None:
            assert not any(literal in text[start:end] for literal in literals)
        else:
            assert text[start:end] in literals


def test_decoding_keeps_bytes_that_are_not_utf8():
    metadata = byte_level_metadata([], [])
    stored = [token.encode() for token in metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"] = [*stored, b"\xff\xfe", "漢".encode()]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.token_bytes(256) == b"\xff\xfe"
    assert tokenizer.token_text(256) == "\ufffd\ufffd"
    assert tokenizer.token_bytes(257) == "漢".encode()
    assert tokenizer.decode_bytes(range(256)) == bytes(range(256))


def test_tokens_of_equal_text_encode_to_the_last():
    metadata = byte_level_metadata([], [])
    metadata["tokenizer.ggml.tokens"].append("a")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert load_tokenizer(metadata, "m.gguf").encode("aa") == [256, 256]


@pytest.mark.parametrize("token", [-1, 256, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(token):
    tokenizer = load_tokenizer(byte_level_metadata([], []), "m.gguf")
    for use in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.kind):
        with pytest.raises(RequestError, match=r"^token: .* is not in 0\.\.255"):
            use(token)
    with pytest.raises(RequestError):
        tokenizer.decode_bytes([0, token])


def test_half_a_surrogate_pair_is_refused():
    tokenizer = load_tokenizer(byte_level_metadata([], []), "m.gguf")
    with pytest.raises(RequestError, match="text: character 1 "):
        tokenizer.encode("a\ud800")


def _without_byte(letter: str, **named_ids: int) -> dict[str, object]:
    """256 bytes but one, then a token of every other kind; 262 is a control token."""
    metadata = byte_level_metadata([], ["<|endoftext|>"])
    metadata["tokenizer.ggml.tokens"][ord(letter)] = "not-it"
    for kind in (TokenKind.UNKNOWN, TokenKind.USER_DEFINED, TokenKind.UNUSED, TokenKind.BYTE):
        metadata["tokenizer.ggml.tokens"].append(f"<{kind.name}>")
        metadata["tokenizer.ggml.token_type"].append(int(kind))
    metadata["tokenizer.ggml.tokens"] += ["<plain>", "<control>"]
    metadata["tokenizer.ggml.token_type"] += [TokenKind.NORMAL, TokenKind.CONTROL]
    return metadata | {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in named_ids.items()}


@pytest.mark.parametrize("letter", ["z", "\x1d"])
@pytest.mark.parametrize(
    ("named_ids", "expected"),
    [
        ({}, []), ({"unknown": 256}, []), ({"unknown": 262}, []),
        ({"unknown": 257, "bos": 257}, []), ({"unknown": 257, "eos": 257}, []),
        ({"unknown": 257, "eot": 257}, []), ({"unknown": 257}, [257]), ({"unknown": 261}, [261]),
    ],
)  # fmt: skip
def test_a_byte_without_a_token_becomes_the_unknown_one_unless_that_is_a_control_token(
    letter, named_ids, expected
):
    """As the ``tokenizers`` package without an unknown token, the byte is dropped."""
    tokenizer = load_tokenizer(_without_byte(letter, **named_ids), "m.gguf")
    assert tokenizer.encode(f"a{letter}b", add_bos=False) == [97, *expected, 98]
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 97, "b": 98}, []))
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert oracle.encode(f"a{letter}b").ids == [97, 98]


def test_a_sentencepiece_vocabulary_without_bytes_drops_what_it_cannot_write():
    """Where the id its file names as the unknown one is a control token."""
    metadata = sentencepiece_metadata({"▁": -1.0, "a": -1.0})
    metadata["tokenizer.ggml.tokens"][3 + 0xC3] = "<gone>"
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.encode("aé", add_bos=False)[2:] == [0, 3 + 0xA9]
    tokenizer = load_tokenizer({**metadata, "tokenizer.ggml.unknown_token_id": 2}, "m.gguf")
    assert tokenizer.encode("aé", add_bos=False)[2:] == [3 + 0xA9]


NFC_FAMILIES = {"command-r", "deepseek-r1-qwen", "mpt", "olmo", "qwen2", "qwen35"}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize(
    "text", ["cafe\u0301", "\u1112\u1161\u11ab", "\u212b", "q\u0307\u0323", "\u0958"]
)
def test_text_is_brought_into_nfc_where_the_family_has_it(pre, text):
    """Accents, Hangul, singletons, the order of marks, and what NFC takes apart."""
    tokenizer = load_tokenizer(
        byte_level_metadata([], ["<|im_end|>"], pre=pre) | {"tokenizer.ggml.add_bos_token": False},
        "m.gguf",
    )
    composed = unicodedata.normalize("NFC", text)
    assert composed != text
    expected = composed if pre in NFC_FAMILIES else text
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == expected.encode()
    assert tokenizer.decode_bytes(tokenizer.encode_exactly(text)) == text.encode()
    around = tokenizer.encode(f"{text}<|im_end|>\u0301", parse_special=True)
    assert tokenizer.decode_bytes(around, special=True) == f"{expected}<|im_end|>\u0301".encode()


def test_generation_ends_at_named_ids_and_known_texts():
    metadata = byte_level_metadata([], ["<|im_end|>", "<|file_sep|>", "<mine>", "<other>"])
    metadata["tokenizer.ggml.eos_token_id"] = np.uint32(258)
    metadata["tokenizer.ggml.suppress_tokens"] = np.array([3, 4], np.int32)
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.eog_ids == {256, 257, 258}
    assert tokenizer.eos_id == 258
    assert tokenizer.suppress_tokens == (3, 4)


def test_a_token_that_ends_generation_by_text_is_control_whatever_the_file_says():
    metadata = byte_level_metadata([], [], ["<|im_end|>"])
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.kind(256) is TokenKind.CONTROL
    assert 256 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [256]
