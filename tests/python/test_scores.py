"""``LLM.score``: how likely given tokens are, in batches, alone, from a position on."""

import math
import threading

import numpy as np
import pytest

from reference.ops.log_probabilities import log_probabilities
from tests.python.conftest import CONTEXT
from zinc_rt import LLM, EngineStopped, RequestError, SamplingParams

TEXT = "the quick brown fox jumps over the lazy dog"


def test_scores_are_those_of_the_logits(llm):
    tokens = llm.tokenize(TEXT)
    (score,) = llm.score(TEXT, top=3)
    logits = llm.logits(TEXT)
    chosen, ids, logs = log_probabilities(
        logits=logits[:-1], token=np.array(tokens[1:], np.int32), top=3
    )
    assert score.tokens == tuple(tokens)
    assert math.isnan(score.log_probabilities[0])
    assert score.log_probabilities[1:].tobytes() == chosen.tobytes()
    assert score.top_tokens[1:].tobytes() == ids.tobytes()
    assert score.top_log_probabilities[1:].tobytes() == logs.tobytes()
    assert score.likeliest[1:].tolist() == (logits[:-1].argmax(axis=1) == tokens[1:]).tolist()
    assert score.total == math.fsum(chosen.tolist())
    assert score.perplexity == math.exp(-score.total / len(chosen))
    assert not score.greedy


def test_many_texts_with_starts_of_their_own(llm):
    """In one call, in order, the same bits as alone; token ids as texts."""
    texts = [TEXT[: 5 + 3 * number] for number in range(9)]
    starts = [1 + number % 4 for number in range(9)]
    scores = llm.score(texts, start=starts)
    assert [score.index for score in scores] == list(range(9))
    for text, start, score in zip(texts, starts, scores, strict=True):
        (alone,) = llm.score([llm.tokenize(text)], start=start)
        assert score.log_probabilities.tobytes() == alone.log_probabilities.tobytes()
        (whole,) = llm.score(text)
        after = score.log_probabilities[start:], whole.log_probabilities[start:]
        assert after[0].tobytes() == after[1].tobytes()
        assert np.isnan(score.log_probabilities[:start]).all()
        assert score.start == start


def test_what_is_generated_has_the_scores_it_was_generated_with(llm):
    """The sampler's log-probabilities are the scorer's; a greedy answer is the likeliest."""
    for temperature in (0.0, 0.9):
        asked = SamplingParams(
            max_tokens=12, temperature=temperature, seed=3, logprobs=0, ignore_end=True
        )
        (output,) = llm.generate(TEXT, asked)
        prompt = llm.tokenize(TEXT)
        (score,) = llm.score([[*prompt, *output.tokens]], start=len(prompt))
        found = output.completion.log_probabilities
        assert found is not None
        assert score.log_probabilities[len(prompt) :].tobytes() == found.tobytes()
        assert score.greedy == (temperature == 0)
        assert [score.rank(len(prompt) + i) for i in range(12)].count(1) >= 12 * score.greedy


def test_a_shared_beginning_is_read_once(llm):
    tokens = [(7 * number) % 250 for number in range(40)]
    llm.score([tokens], start=35)
    (again,) = llm.score([[*tokens[:36], 9, 9]], start=36)
    assert again.cached_tokens >= 32


def test_texts_that_cannot_be_scored_take_nothing_from_the_others(llm):
    good, empty, one, far, long, unknown = llm.score(
        ["abc", "", [5], "abc", [1] * (CONTEXT + 1), [1, 999_999]], start=[1, 1, 1, 3, 1, 1]
    )
    assert good.error is None
    assert (one.error, one.total, one.greedy) == (None, 0.0, True)
    assert math.isnan(one.perplexity)
    for score, field in ((empty, "text"), (far, "start"), (long, "text")):
        assert isinstance(score.error, RequestError)
        assert score.error.field == field
        with pytest.raises(RequestError):
            _ = score.total
    for score in (unknown, *llm.score([[999_999], [-1]])):
        assert isinstance(score.error, RequestError)
        assert "outside 0 to" in str(score.error)
    assert llm.score([]) == []
    whole = [1 + number % 200 for number in range(CONTEXT)]
    (full,) = llm.score([whole])
    assert np.isfinite(full.log_probabilities[1:]).all()
    (bare,) = llm.score([[5]], start=2)
    assert isinstance(bare.error, RequestError)
    with pytest.raises(RequestError, match="one for each"):
        llm.score(["a", "b"], start=[1])
    pair = llm.score(["abc", "abc"], start=np.array([1, 2]))  # type: ignore[arg-type]
    assert [one.start for one in pair] == [1, 2]
    (many,) = llm.score(["abc"], top=21)
    assert isinstance(many.error, RequestError)


def test_threads_score_and_generate_at_once(llm):
    (alone,) = llm.score(TEXT)
    found: list[bytes] = []

    def scoring() -> None:
        found.extend(one.log_probabilities.tobytes() for one in llm.score([TEXT] * 4))

    def generating() -> None:
        llm.generate([TEXT] * 4, SamplingParams(max_tokens=8, ignore_end=True))

    threads = [threading.Thread(target=work) for work in (scoring, generating, scoring)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {alone.log_probabilities.tobytes()}
    assert len(found) == 8


def test_an_engine_without_log_probabilities_has_no_scores(tiny_model_path):
    with LLM(tiny_model_path, tier="cpu", context=64, log_probabilities=0, progress=False) as plain:
        (score,) = plain.score("one two")
        assert isinstance(score.error, RequestError)
        assert "built without" in str(score.error)
    with pytest.raises(EngineStopped):
        plain.score("one two")
