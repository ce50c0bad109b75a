"""Answers of a model that frames messages, as ``run`` and ``chat`` show them."""

from pathlib import Path

import pytest

from contract.types import SamplingParams
from harness.host.dialect import dialect_of
from harness.host.harmony_reply import FramedAnswer
from harness.host.options import SessionOptions
from harness.host.session import Session
from reference.model.chat_template import encode_chat
from tests.serve.harmony import harmony_model

pytestmark = pytest.mark.usefixtures("native_is_quick")

MESSAGES = [{"role": "user", "content": "Hi"}]
SEEDS = range(4)
"""With some of them the model samples marks where none belong."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return harmony_model(tmp_path_factory.mktemp("framed"))


def test_a_chat_shows_thoughts_and_text_and_no_marks(path):
    """What is shown is what the parser makes of the tokens; without a chat they stay text."""
    marked = 0
    with Session.open(path, SessionOptions(tier="native", context=256, chat=True)) as session:
        tokenizer, template = session.model.tokenizer, session.template
        assert template is not None
        dialect = dialect_of(template.text, tokenizer)
        prompt = encode_chat(tokenizer, template, MESSAGES)
        for seed in SEEDS:
            sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            generation = session.generate(prompt, sampling, 30, chat=True)
            shown = "".join(piece.text for piece in generation)
            marked += any(token in dialect.shown for token in generation.tokens)
            said = b"".join(
                tokenizer.token_bytes(token, special=token in dialect.shown)
                for token in generation.tokens
            )
            expected = FramedAnswer.of(dialect)
            parser, text = expected.parser, said.decode(errors="replace")
            assert shown == expected.take([*parser.feed(text), *parser.finish()])
            assert generation.text == expected.content
            plain = session.generate(prompt, sampling, 30)
            assert "".join(piece.text for piece in plain) == plain.text
            assert plain.tokens == generation.tokens
    assert marked
