"""The generator's own vocabularies mean the same to llama.cpp as to this runtime."""

import unicodedata

import pytest

from harness.synth.architectures import ARCHITECTURES
from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import load_tokenizer
from tests.peer.texts import varied_texts

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_are_llama_cpps(synthetic_model, peer, architecture):
    path = synthetic_model(architecture=architecture)
    with open_gguf(path) as file:
        ours = load_tokenizer(file.metadata, str(path))
    texts = ["the cat is on it", *varied_texts()]
    if architecture in ("olmo", "smallthinker") or architecture.startswith(
        ("qwen", "command-r", "cohere", "olmoe", "dots1", "gptneox")
    ):
        # The tokenizer of these families brings text into NFC first, which llama.cpp leaves out.
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    expected = peer.encode(path, texts, parse_special=False, add_bos=True)
    assert {text: ours.encode(text) for text in texts} == dict(zip(texts, expected, strict=True))
