"""Metadata that cannot be a tokenizer is refused with the file, the key and the reason."""

import numpy as np
import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.gguf.strings import StringArray
from reference.model.tokenizer import load_tokenizer
from tests.model.tokenizer_data import byte_level_metadata, sentencepiece_metadata
from tests.tables import table


def _refused(metadata: dict[str, object], key: str) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_tokenizer(metadata, "m.gguf")
    message = str(caught.value)
    assert message.startswith(f"m.gguf: tokenizer.ggml.{key}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "merges"])
def test_a_missing_key(key):
    metadata = byte_level_metadata([], [])
    del metadata[f"tokenizer.ggml.{key}"]
    assert "missing" in _refused(metadata, key)


@pytest.mark.parametrize(("key", "known"), [("model", "gpt2"), ("pre", "qwen2")])
def test_an_unknown_kind_is_unsupported_and_the_known_ones_are_named(key, known):
    metadata = byte_level_metadata([], []) | {f"tokenizer.ggml.{key}": "novel"}
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.{key}: 'novel'.*{known}"):
        load_tokenizer(metadata, "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 7), ("tokens", []), ("tokens", 7), ("tokens", [1, 2]), ("tokens", "abc"),
        ("token_type", [1]), ("token_type", [1] * 300), ("token_type", [99] * 256),
        ("token_type", [-1] * 256), ("token_type", "normal"), ("merges", 7), ("merges", [1]),
        ("scores", [0.5]), ("scores", [float("nan")] * 256), ("bos_token_id", 256),
        ("eos_token_id", -1), ("eot_token_id", "eot"), ("fim_pad_token_id", True),
        ("add_bos_token", "yes"), ("suppress_tokens", [256]), ("suppress_tokens", [[1]]),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense(key, value):
    _refused(byte_level_metadata([], []) | {f"tokenizer.ggml.{key}": value}, key)


@pytest.mark.parametrize("scores", [[1.0], [float("inf")] * 260, ["x"] * 260, None])
def test_sentencepiece_needs_a_finite_score_for_every_token(scores):
    metadata = sentencepiece_metadata({"a": -1.0})
    if scores is None:
        del metadata["tokenizer.ggml.scores"]
    else:
        metadata["tokenizer.ggml.scores"] = scores
    _refused(metadata, "scores")


def test_bos_is_required_where_every_prompt_starts_with_it():
    metadata = byte_level_metadata([], []) | {"tokenizer.ggml.add_bos_token": True}
    _refused(metadata, "bos_token_id")


@pytest.mark.parametrize(
    ("changes", "add_bos"), table(__file__, "test_tokenizer_load")["when_a_prompt_starts_with_bos"]
)
def test_when_a_prompt_starts_with_bos(changes, add_bos):
    metadata = byte_level_metadata([], [])
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.add_bos is add_bos
    assert (tokenizer.encode("b")[0] == 0) is add_bos
    assert tokenizer.encode("b", add_bos=False)[0] != 0


def test_sentencepiece_defaults():
    tokenizer = load_tokenizer(sentencepiece_metadata({"▁": -1.0}), "m.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    metadata = sentencepiece_metadata({"a": -1.0}) | {"tokenizer.ggml.add_space_prefix": False}
    assert load_tokenizer(metadata, "m.gguf").encode("a", add_bos=False) == [259]


def test_strings_may_be_bytes_and_numbers_arrays():
    metadata = byte_level_metadata(["a b"], ["<c>"])
    as_bytes = dict(metadata)
    for key in ("tokens", "merges"):
        name = f"tokenizer.ggml.{key}"
        as_bytes[name] = [item.encode() for item in metadata[name]]
    as_bytes["tokenizer.ggml.token_type"] = np.array(
        metadata["tokenizer.ggml.token_type"], np.int32
    )
    expected = load_tokenizer(metadata, "m.gguf").encode("ab<c>", parse_special=True)
    assert load_tokenizer(as_bytes, "m.gguf").encode("ab<c>", parse_special=True) == expected


def test_merges_that_lead_nowhere_do_no_harm():
    """Unknown symbols, results that are no token, repeats, loops and malformed entries."""
    metadata = byte_level_metadata([], [])
    metadata["tokenizer.ggml.merges"] = ["q q", "a b", "ab ab", "zz", "", " ", "a b", "x  y"]
    tokenizer = load_tokenizer(metadata, "m.gguf")
    assert tokenizer.decode_bytes(tokenizer.encode("qqababzz x  y")) == b"qqababzz x  y"


class Counted(StringArray):
    """Counts the strings that become objects."""

    made = 0

    def __getitem__(self, index):
        Counted.made += 1
        return super().__getitem__(index)

    def to_list(self):
        Counted.made += len(self)
        return super().to_list()


def _counted_metadata(merges: list[str], control: list[str]) -> dict[str, object]:
    metadata = byte_level_metadata(merges, control)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        strings = StringArray.of([item.encode() for item in metadata[key]])
        metadata[key] = Counted(strings.octets, strings.offsets)
    Counted.made = 0
    return metadata


def test_only_what_a_text_meets_of_a_vocabulary_becomes_objects():
    """Opening makes none of the tokens and merges; encoding those that begin as the text does."""
    words = [f"{a}{b}{c}" for a in "bcdfgh" for b in "aeiou" for c in "klmnp"]
    merges = [f"{word[0]} {word[1]}" for word in words] + [
        f"{word[:2]} {word[2]}" for word in words
    ]
    tokenizer = load_tokenizer(_counted_metadata(merges, ["<c>"]), "m.gguf")
    assert (tokenizer.vocab_size, tokenizer.longest_token, Counted.made) == (557, 3, 0)
    assert tokenizer.eog_ids == frozenset()
    assert tokenizer.token_bytes(256) == b"ba"
    assert Counted.made == 1
    assert tokenizer.decode_bytes(tokenizer.encode("bak<c>", parse_special=True)) == b"bak"
    assert Counted.made < 60
