"""Events to text: what ends an answer, and what belongs to it."""

import pytest

from contract.errors import NonFiniteLogits
from contract.types import FinishReason, Request, TokenEvent
from harness.host.answer_text import AnswerText
from reference.model.open import open_model
from reference.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path) -> Tokenizer:
    with (model := open_model(tiny_model_path)).file:
        return model.tokenizer


def answered(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], last: FinishReason
) -> AnswerText:
    """The answer of a model that says ``text`` and ends for ``last``."""
    answer = AnswerText(tokenizer, Request(1, (1,), 8, stop=stop))
    ids = tokenizer.encode(text)
    told = ""
    for position, token in enumerate(ids):
        ends = last if position == len(ids) - 1 else None
        piece = answer.take(TokenEvent(1, token, position, ends))
        assert piece is not None
        told += piece.text
        if piece.finish is not None:
            break
    assert told == answer.text
    assert answer.take(TokenEvent(1, 1, 99)) is None
    return answer


def test_a_stop_string_ends_it(tokenizer):
    answer = answered(tokenizer, "one two three", ("two",), FinishReason.LENGTH)
    assert answer.text == "one "
    assert (answer.finish_reason, answer.stop_string) == (FinishReason.STOP, "two")


def test_a_stop_string_that_was_held_to_the_end(tokenizer):
    """ "two" waits for "wo th..." no longer once the tokens are spent."""
    answer = answered(tokenizer, "one two", ("one two three", "two"), FinishReason.LENGTH)
    assert answer.text == "one "
    assert answer.finish_reason is FinishReason.STOP


def test_the_token_that_ends_the_generation_is_not_of_the_text(tokenizer):
    answer = answered(tokenizer, "abc", (), FinishReason.STOP)
    assert (answer.text, len(answer.tokens)) == ("ab", 2)


def test_without_stop_strings_all_of_it(tokenizer):
    answer = answered(tokenizer, "one two", (), FinishReason.LENGTH)
    assert (answer.text, answer.stop_string) == ("one two", None)
    assert answer.finish_reason is FinishReason.LENGTH


def test_a_model_that_fails(tokenizer):
    answer = AnswerText(tokenizer, Request(1, (1,), 8))
    with pytest.raises(NonFiniteLogits, match="position 7"):
        answer.take(TokenEvent(1, -1, 7, FinishReason.ERROR))
    assert answer.finish_reason is FinishReason.ERROR
