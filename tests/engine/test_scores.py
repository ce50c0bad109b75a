"""Log-probabilities of a prompt's own tokens: those of the definition, the same bits in any mix."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.types import FinishReason, Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import PromptLookup
from reference.ops.log_probabilities import log_probabilities
from reference.runner import StepInput
from reference.sched.constraints import pack_mask
from reference.sched.scores import TokenScores
from tests.engine.scored_prompts import (
    LIMITS,
    PROMPT,
    QUICK,
    Receiver,
    by_definition,
    run,
    score,
    submit,
)


def test_they_are_those_of_the_definition(scoring, tiny_model_path):
    """Alone, and only from some position on, which makes fewer rows."""
    for start in (1, 2, 17, len(PROMPT) - 1):
        engine = Engine(scoring, EngineOptions(prefix_cache=False))
        receiver = submit(engine, score(1, start=start))
        (event,) = run(engine)[1]
        assert (event.token, event.finish_reason) == (-1, FinishReason.LENGTH)
        assert receiver.bits == by_definition(tiny_model_path, start=start)


def test_a_prefix_before_the_scored_tokens_is_not_computed_again(quick):
    engine = Engine(quick)
    first = submit(engine, score(1, start=40))
    run(engine)
    again = submit(engine, score(2, start=40))
    run(engine)
    assert engine.statistics.prefix.tokens_hit == 32  # whole pages before position 39
    assert again.bits == first.bits
    submit(engine, score(3, start=1))
    run(engine)
    assert engine.statistics.prefix.tokens_hit == 32


def test_only_rows_that_are_read_are_computed(quick, monkeypatch):
    """A long context before few scored tokens is read in whole chunks, with a row a token."""
    steps: list[StepInput] = []
    engine = Engine(quick, EngineOptions(prefix_cache=False))
    submitted = quick.submit

    def watched(inputs: StepInput) -> Any:
        steps.append(inputs)
        return submitted(inputs)

    monkeypatch.setattr(quick, "submit", watched)
    submit(engine, score(1, PROMPT, 46))
    run(engine)
    assert [(len(step.query), len(step.output_rows)) for step in steps] == [(37, 0), (12, 4)]


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["plain", "drafts"])
@pytest.mark.parametrize("scoring", QUICK, indirect=True)
def test_a_prompt_is_scored_and_continued(scoring, tiny_model_path, drafter):
    """The continuation is that of the request without scores: penalties, mask, bias and all."""
    prompt = PROMPT[:20] + PROMPT[:20]
    vocab = scoring.model.config.vocab
    mask = pack_mask(range(10, 60), vocab)
    sampling = SamplingParams(temperature=0.7, seed=5, repeat_penalty=1.3, repeat_last_n=30)
    more: dict[str, Any] = {
        "log_probabilities": 2, "max_tokens": 8, "sampling": sampling, "ignore_end": True,
    }  # fmt: skip
    for allowed in (None, lambda generated: mask):
        plain = Engine(scoring, EngineOptions(prefix_cache=False))
        plain.submit(Request(1, prompt, **more), allowed=allowed)
        expected = run(plain)[1]
        engine = Engine(scoring, EngineOptions(prefix_cache=False), drafter=drafter)
        receiver = submit(engine, score(1, prompt, **more), allowed=allowed)
        assert run(engine)[1] == expected
        assert receiver.bits == by_definition(tiny_model_path, prompt)


@pytest.mark.parametrize("scoring", QUICK, indirect=True)
def test_a_grammar_does_not_forbid_what_is_scored(scoring, tiny_model_path):
    """Rule R10 is about the logits before any mask, so a mask of a scored text changes nothing."""
    nothing = np.zeros_like(pack_mask((), scoring.model.config.vocab))
    engine = Engine(scoring, EngineOptions(prefix_cache=False))
    receiver = submit(engine, score(1), allowed=lambda generated: nothing)
    assert run(engine)[1][-1].finish_reason is FinishReason.LENGTH
    assert receiver.bits == by_definition(tiny_model_path)


@pytest.mark.parametrize("scoring", QUICK, indirect=True)
def test_logits_and_scores_at_once(scoring, tiny_model_path):
    rows: list[tuple[int, NDArray[np.float32]]] = []
    engine = Engine(scoring, EngineOptions(prefix_cache=False))
    receiver = submit(
        engine, score(1, start=9), on_logits=lambda *part: rows.append(part), logits_from=30
    )
    run(engine)
    assert receiver.bits == by_definition(tiny_model_path, start=9)
    logits = np.concatenate([values for _, values in rows])
    assert (rows[0][0], len(logits)) == (30, len(PROMPT) - 30)
    chosen, _, _ = log_probabilities(
        logits=logits[:-1], token=np.array(PROMPT[31:], np.int32), top=1
    )
    assert chosen.tobytes() == by_definition(tiny_model_path, start=31)[0]


def test_a_cancelled_request_is_told_nothing_more(quick, tiny_model_path):
    """Cancelled between two steps, and by the receiver itself; the other goes on."""
    engine = Engine(quick, EngineOptions(chunk_tokens=8, steps_ahead=2, prefix_cache=False))
    cancelled, other = submit(engine, score(1)), submit(engine, score(2))
    own: list[TokenScores] = []

    def take(scores: TokenScores) -> None:
        own.append(scores)
        engine.cancel(3)

    engine.submit(score(3), on_scores=take)
    engine.step()
    engine.cancel(1)
    count = len(cancelled.parts)
    events = run(engine)
    assert events.keys() == {2}
    assert len(cancelled.parts) == count
    assert len(own) == 1
    assert other.bits == by_definition(tiny_model_path)


def test_the_whole_context_and_two_tokens(quick, tiny_model_path):
    longest = tuple((i * 11) % 250 for i in range(LIMITS.context))
    for prompt in (longest, longest[:2]):
        engine = Engine(quick, EngineOptions(prefix_cache=False))
        receiver = submit(engine, score(1, prompt))
        assert run(engine)[1][-1].finish_reason is FinishReason.LENGTH
        assert receiver.bits == by_definition(tiny_model_path, prompt)


def test_none_are_listed_where_none_are_asked_for(quick, tiny_model_path):
    engine = Engine(quick)
    receiver = submit(engine, score(1, score_top=0))
    run(engine)
    assert receiver.bits == by_definition(tiny_model_path, listed=0)


@pytest.mark.parametrize(
    ("prompt", "start", "problem"),
    [
        ((), 1, "prompt: is empty"),
        ((5,), 1, "score_from: is 1, not from 1 to 0"),
        (PROMPT, 0, "score_from: is 0, not from 1 to 49"),
        (PROMPT, 50, "score_from: is 50"),
        (PROMPT, True, "score_from: is True"),
        ((*PROMPT, 100_000), 1, "prompt: holds a token id outside"),
        ((*PROMPT, -1), 1, "prompt: holds a token id outside"),
        (PROMPT * 2, 1, "prompt: is too long: 100 tokens > 96 maximum"),
    ],
)
def test_refusals(quick, prompt, start, problem):
    engine = Engine(quick)
    with pytest.raises(RequestError, match=problem):
        engine.submit(score(1, prompt, start), on_scores=Receiver(1))
    assert engine.idle


@pytest.mark.parametrize("top", [-1, 6, None])
def test_no_more_are_listed_than_the_limits_have(quick, top):
    with pytest.raises(RequestError, match="score_top: is"):
        Engine(quick).submit(score(1, score_top=top), on_scores=Receiver(1))
