"""Answers whose tokens a caller gives, and the experts that tokens of a mixture use."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.families_table import FAMILIES
from zinc_rt import LLM, RequestError, SamplingParams

TEXT = "the quick brown fox"
SAMPLED = SamplingParams(
    max_tokens=12, temperature=0.9, seed=3, logprobs=2, logits=True, ignore_end=True
)


@pytest.fixture(scope="module", params=["cpu", "native"])
def mixture(request, synthetic_model) -> Iterator[LLM]:
    path = synthetic_model(**FAMILIES["qwen3moe"], quant="q4_k_m")
    with LLM(path, tier=request.param, slots=3, context=96, experts=True, progress=False) as opened:
        yield opened


def test_a_given_answer_has_the_rows_of_the_answer_by_itself(llm):
    """Log-probabilities, lists and logits to the bit, beside others."""
    own = llm.generate(TEXT, SAMPLED)[0].completion
    asked = SamplingParams(force_tokens=own.tokens, logprobs=2, logits=True, ignore_end=True)
    assert asked.max_tokens == 12
    assert replace(asked, force_tokens=np.array(own.tokens)) == replace(asked, seed=asked.seed)
    assert SamplingParams(force_tokens=None) == SamplingParams()
    outputs = llm.generate(
        ["other", TEXT, [5, 6, 7]],
        [SamplingParams(max_tokens=9), asked, SamplingParams(force_tokens=[9, 8], logprobs=0)],
    )
    again = outputs[1].completion
    assert (again.tokens, again.text, again.finish_reason) == (own.tokens, own.text, "length")
    for name in ("log_probabilities", "top_tokens", "top_log_probabilities", "logits"):
        assert getattr(again, name).tobytes() == getattr(own, name).tobytes()
    (score,) = llm.score([[5, 6, 7, 9, 8]], start=3)
    other = outputs[2].completion
    assert other.log_probabilities.tobytes() == score.log_probabilities[3:].tobytes()


def test_a_given_answer_in_a_conversation_and_a_stream(llm):
    asked = SamplingParams(force_tokens=[70, 71, 72], logprobs=1)
    (answer,) = llm.chat("Hello", asked)
    prompt = llm.encode_chat("Hello")
    (score,) = llm.score([[*prompt, 70, 71, 72]], start=len(prompt))
    found = answer.completion.log_probabilities
    assert found.tobytes() == score.log_probabilities[len(prompt) :].tobytes()
    stream = llm.stream_chat("Hello", asked)
    assert "".join(piece.text for piece in stream) == answer.text


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"force_tokens": "ab"}, "force_tokens: is 'ab', not a list of token ids"),
        ({"force_tokens": [1, -1]}, "force_tokens: is -1"),
        ({"force_tokens": []}, "force_tokens: is empty; give at least one token, or None"),
        ({"force_tokens": np.array([1.5])}, "force_tokens: is 1.5"),
        ({"force_tokens": np.array([[1]])}, "force_tokens: is "),
        ({"force_tokens": [1], "n": 2}, "force_tokens: are a whole answer"),
        ({"force_tokens": [1], "stop": "a"}, "force_tokens: are a whole answer"),
        ({"force_tokens": [1], "stop_token_ids": [4]}, "force_tokens: are a whole answer"),
        ({"experts": 1}, "experts: is 1, not True or False"),
    ],
)
def test_refusals(fields, problem):
    with pytest.raises(RequestError, match=problem):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_experts_of_answers_and_of_scores_are_the_same(mixture):
    """Of every token but the last, sampled, given or read; several choices have their own."""
    asked = SamplingParams(max_tokens=7, temperature=0.9, experts=True, ignore_end=True, n=2)
    (output,) = mixture.generate([[1, 2, 3, 4]], asked)
    for completion in output.completions:
        tokens = [1, 2, 3, 4, *completion.tokens]
        assert completion.experts.shape == (10, 2, 3)
        (score,) = mixture.score([tokens], experts=True)
        assert np.array_equal(score.experts, completion.experts)
        given = SamplingParams(force_tokens=completion.tokens, experts=True)
        again = mixture.generate([[1, 2, 3, 4]], given)[0].completion
        assert np.array_equal(again.experts, completion.experts)
    assert mixture.generate([[1, 2]], SamplingParams(max_tokens=2))[0].completion.experts is None
    assert mixture.score([[1, 2, 3]])[0].experts is None


def test_an_answer_that_a_stop_string_cuts_has_experts_of_its_tokens(mixture):
    asked = SamplingParams(max_tokens=30, temperature=0.9, seed=5, experts=True, ignore_end=True)
    whole = mixture.generate([[1, 2, 3, 4]], asked)[0].completion
    text = whole.text[: len(whole.text) // 2]
    cut = SamplingParams(
        max_tokens=30, temperature=0.9, seed=5, experts=True, ignore_end=True, stop=text[-2:]
    )
    found = mixture.generate([[1, 2, 3, 4]], cut)[0].completion
    assert found.finish_reason == "stop"
    assert 0 < len(found.experts) < len(whole.experts)
    assert np.array_equal(found.experts, whole.experts[: len(found.experts)])


def test_a_model_without_experts_says_so(llm):
    for output in (
        llm.generate(TEXT, SamplingParams(max_tokens=2, experts=True))[0],
        llm.score(TEXT, experts=True)[0],
    ):
        assert isinstance(output.error, RequestError)
        assert str(output.error) == "experts: cannot be read: the model has none"
