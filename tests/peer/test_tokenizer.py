"""Every text becomes the same ids as in llama.cpp, with control tokens parsed or not."""

import unicodedata
from pathlib import Path

import pytest

from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import Tokenizer, load_tokenizer
from tests.model.tokenizer_data import SHARED_VOCABULARIES, shared_vocabulary_path
from tests.peer.texts import varied_texts

pytestmark = pytest.mark.peer

CASE_SEPARATOR = b"\n__ggml_vocab_test__\n"
DEFAULT_MODEL = "default model"


@pytest.fixture(scope="module", params=[*SHARED_VOCABULARIES, DEFAULT_MODEL])
def path(request) -> Path:
    if request.param == DEFAULT_MODEL:
        return request.getfixturevalue("default_model_path")
    return shared_vocabulary_path(request.param)


@pytest.fixture(scope="module")
def ours(path) -> Tokenizer:
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata, str(path))
        tokenizer.encode("a")
    return tokenizer


def texts_for(path: Path) -> list[str]:
    stored = path.with_name(path.name + ".inp")
    vectors = stored.read_bytes().split(CASE_SEPARATOR) if stored.exists() else []
    return [*(vector.decode() for vector in vectors), *varied_texts()]


def test_there_are_enough_texts():
    assert len(varied_texts()) > 200


@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_are_llama_cpps(path, ours, peer, parse_special):
    """llama.cpp normalizes nothing: a family with a normal form is asked for texts in it."""
    texts = texts_for(path)
    if "qwen" in path.name:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    control = {"parse_special": parse_special, "add_bos": False}
    expected = dict(zip(texts, peer.encode(path, texts, **control), strict=True))
    assert {text: ours.encode(text, **control) for text in texts} == expected


def test_the_models_own_rule_for_bos_is_llama_cpps(path, ours, peer):
    texts = ["", "Hello", " a\nb"]
    expected = peer.encode(path, texts, parse_special=False, add_bos=True)
    assert [ours.encode(text) for text in texts] == expected
