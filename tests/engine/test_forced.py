"""Answers whose tokens are given: log-probabilities of the definition, and those of the answer that
a model gives by itself, with the same bits in any mix."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.types import FinishReason, Request, SamplingParams, TokenEvent
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import PromptLookup
from reference.sched.constraints import pack_mask
from tests.engine.scored_prompts import (
    LIMITS,
    LISTED,
    PROMPT,
    QUICK,
    break_tokens,
    by_definition,
    run,
    runs_of,
    score,
    submit,
)
from tests.named_tiers import quick_tier, runner_on

CUT = 31
SAID = PROMPT[CUT:]
"""An answer to the beginning of a prompt."""
WHOLE = EngineOptions(prefix_cache=False)


def forced(number: int, prompt: tuple[int, ...] = PROMPT[:CUT], **more: Any) -> Request:
    said = more.pop("said", SAID)
    fields = {"max_tokens": len(said), "log_probabilities": LISTED, **more}
    return Request(number, prompt, force_tokens=said, **fields)


def bits(events: list[TokenEvent]) -> tuple[bytes, bytes, bytes]:
    """The log-probabilities and lists of events, as ``by_definition`` has them."""
    ids = [[token for token, _ in event.top] for event in events]
    logs = [[log for _, log in event.top] for event in events]
    chosen = [event.log_probability for event in events]
    return (
        np.array(chosen, np.float32).tobytes(),
        np.array(ids, np.int32).tobytes(),
        np.array(logs, np.float32).tobytes(),
    )


def test_they_are_those_of_the_definition(scoring, tiny_model_path):
    for cut in (1, 16, CUT, len(PROMPT) - 1):
        events = run(Engine(scoring, WHOLE), forced(1, PROMPT[:cut], said=PROMPT[cut:]))[1]
        assert [event.token for event in events] == list(PROMPT[cut:])
        assert [event.position for event in events] == list(range(cut, len(PROMPT)))
        reasons = [event.finish_reason for event in events]
        assert reasons == [None] * (len(events) - 1) + [FinishReason.LENGTH]
        assert bits(events) == by_definition(tiny_model_path, start=cut)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)])
@pytest.mark.parametrize("scoring", QUICK, indirect=True)
def test_what_a_model_says_by_itself_has_the_same_events(scoring, sampling):
    """Penalties, biases and masks included, since rule R10 is of the logits before them."""
    penalized = replace(sampling, repeat_penalty=1.2, repeat_last_n=20)
    bias = ((7, 2.0), (9, -3.0))
    own = Request(
        1, PROMPT[:CUT], 12, penalized, ignore_end=True, logit_bias=bias, log_probabilities=LISTED
    )
    mask = pack_mask(range(5, 200), scoring.model.config.vocab)
    engine = Engine(scoring, WHOLE)
    engine.submit(own, allowed=lambda generated: mask)
    expected = run(engine)[1]
    said = tuple(event.token for event in expected)
    assert run(Engine(scoring, WHOLE), replace(own, force_tokens=said))[1] == expected


@pytest.mark.parametrize(
    ("scoring", "chunk", "ahead"), runs_of((5, 3), (1, 0), (32, 1)), indirect=["scoring"]
)
def test_company_and_chunks_change_no_bit(scoring, tiny_model_path, chunk, ahead):
    """Beside others that sample, are scored, or are forced, too; and those do not change."""
    drafter = PromptLookup() if ahead == 3 else None
    other = Request(
        3, PROMPT[:9] * 2, 20, SamplingParams(temperature=0.8), ignore_end=True,
        logit_bias=((7, 100.0), (9, -3.0)),
    )  # fmt: skip
    expected = run(Engine(scoring, WHOLE), other)[3]
    engine = Engine(scoring, EngineOptions(chunk_tokens=chunk, steps_ahead=ahead), drafter=drafter)
    engine.submit(other)
    engine.submit(forced(1))
    engine.submit(forced(4, PROMPT[:3], said=PROMPT[3:20]))
    scored = submit(engine, Request(2, PROMPT, 0, score_from=4, score_top=LISTED))
    events = run(engine)
    assert events[3] == expected
    assert bits(events[1]) == by_definition(tiny_model_path, start=CUT)
    assert bits(events[4]) == by_definition(tiny_model_path, PROMPT[:20], 3)
    assert scored.bits == by_definition(tiny_model_path, start=4)


@pytest.mark.parametrize("scoring", ["late", "native"], indirect=True)
def test_preempted_and_shared_ones_have_the_same_bits(scoring, tiny_model_path):
    """More requests than pages hold, which begin alike: cached, evicted, preempted, recomputed."""
    engine = Engine(scoring, EngineOptions(chunk_tokens=7))
    scored = []
    for number in range(6):
        engine.submit(Request(100 + number, PROMPT[: 3 + number], 60, ignore_end=True))
        cut = number * 8 + 1
        engine.submit(forced(number, PROMPT[:cut], said=PROMPT[cut:]))
        scored.append(submit(engine, score(200 + number, start=cut)))
    events = run(engine)
    assert engine.statistics.preempted > 0
    for number, receiver in enumerate(scored):
        expected = by_definition(tiny_model_path, start=number * 8 + 1)
        assert bits(events[number]) == receiver.bits == expected


@pytest.mark.parametrize("scoring", QUICK, indirect=True)
def test_the_prompt_may_have_scores_too(scoring, tiny_model_path):
    engine = Engine(scoring, EngineOptions(chunk_tokens=9))
    receiver = submit(engine, forced(1, score_from=2, score_top=LISTED))
    events = run(engine)[1]
    assert bits(events) == by_definition(tiny_model_path, start=CUT)
    parts = zip(receiver.bits, by_definition(tiny_model_path, start=2), strict=True)
    assert all(whole.startswith(part) and len(part) < len(whole) for part, whole in parts)
    assert sum(len(part.log_probability) for part in receiver.parts) == CUT - 2


@pytest.mark.parametrize("scoring", QUICK, indirect=True)
def test_logits_are_those_that_its_tokens_would_be_sampled_from(scoring, tiny_model_path):
    """Of each token once, also with chunks; without log-probabilities the events have none."""
    for chunk in (3, 32):
        parts: list[NDArray[np.float32]] = []
        engine = Engine(scoring, EngineOptions(prefix_cache=False, chunk_tokens=chunk))
        request = forced(1, log_probabilities=None)
        engine.submit(request, lambda first, rows, parts=parts: parts.append(rows), CUT - 1)
        events = run(engine)[1]
        assert [event.token for event in events] == list(SAID)
        assert {(event.log_probability, event.top) for event in events} == {(None, ())}
        shifted = np.concatenate(parts).astype(np.float64)
        assert len(shifted) == len(SAID)
        shifted -= shifted.max(axis=1, keepdims=True)
        exact = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        found = np.frombuffer(by_definition(tiny_model_path, start=CUT)[0], np.float32)
        assert np.allclose(found, exact[np.arange(len(SAID)), list(SAID)], atol=1e-4)


def test_no_prompt_token_is_computed_again_and_none_is_sampled(quick):
    """A prefix comes from the cache, and the answer is computed in chunks as a prompt is."""
    engine = Engine(quick)
    expected = run(engine, forced(1))[1]
    steps = engine.statistics.steps
    assert bits(run(engine, forced(2))[2]) == bits(expected)
    assert engine.statistics.prefix.tokens_hit == 16
    assert engine.statistics.steps - steps <= -(-len(SAID) // LIMITS.step_rows) + 1


def test_its_last_token_may_end_it(quick):
    end = 9
    ends = replace(WHOLE, end_of_generation=frozenset({end}))
    for ignored, reason in ((False, FinishReason.STOP), (True, FinishReason.LENGTH)):
        asked = forced(1, said=(5, end, 6, end), ignore_end=ignored)
        events = run(Engine(quick, ends), asked)[1]
        assert [event.token for event in events] == [5, end, 6, end]
        assert [event.finish_reason for event in events] == [None, None, None, reason]


def test_an_engine_that_fails_goes_on_where_it_was(quick, tiny_model_path, monkeypatch):
    """A step is lost between two that gave tokens: each token has one event."""
    engine = Engine(quick, EngineOptions(chunk_tokens=6, steps_ahead=0))
    engine.submit(forced(1, PROMPT[:3], said=PROMPT[3:]))
    events: list[TokenEvent] = []
    while len(events) < 9:
        events += engine.step()

    def fails(submission: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(quick, "collect", fails)
        with pytest.raises(MemoryError):
            engine.advance()
    events += engine.run()
    assert [event.position for event in events] == list(range(3, len(PROMPT)))
    assert bits(events) == by_definition(tiny_model_path, start=3)


def test_a_broken_row_ends_it(quick, monkeypatch):
    """A token that the device did not give, as where a logit is not finite, has no score."""
    break_tokens(quick, monkeypatch)
    engine = Engine(quick, WHOLE)
    receiver = submit(engine, score(2))
    events = run(engine, forced(1))
    ends = [(event.token, event.finish_reason) for part in events.values() for event in part]
    assert ends == [(-1, FinishReason.ERROR)] * 2
    assert np.isnan(receiver.parts[-1].log_probability).all()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"said": (1, 100_000)}, "force_tokens: holds a token id outside"),
        ({"said": (1, -1)}, "force_tokens: holds a token id outside"),
        ({"max_tokens": 5}, "max_tokens: is 5, not 19"),
        ({"stop": ("a",)}, "force_tokens: is a whole answer; stop strings"),
        ({"said": tuple(range(66))}, "force_tokens: is 66 tokens, which with the prompt exceed"),
    ],
)
def test_refusals(quick, fields, problem):
    engine = Engine(quick)
    with pytest.raises(RequestError, match=problem):
        engine.submit(forced(1, **fields))
    with pytest.raises(RequestError, match="force_tokens: is a whole answer; a grammar"):
        engine.submit(forced(1), allowed=lambda generated: None)
    assert engine.idle


@pytest.mark.parametrize("asked", [forced(1), score(1)], ids=["forced", "scored"])
def test_an_engine_without_scores_refuses_them(tiny_model_path, asked):
    with (
        runner_on(tiny_model_path, quick_tier, replace(LIMITS, scores=False)) as runner,
        pytest.raises(RequestError, match="built without scores"),
    ):
        Engine(runner).submit(asked)


def test_another_token_has_other_bits(quick, tiny_model_path):
    """Negative control: one token of the answer changed changes its own and all that follow."""
    other = (*SAID[:4], (SAID[4] + 1) % 250, *SAID[5:])
    events = run(Engine(quick, WHOLE), forced(1, said=other))[1]
    found = np.frombuffer(bits(events)[0], np.float32)
    expected = np.frombuffer(by_definition(tiny_model_path, start=CUT)[0], np.float32)
    same = found == expected
    assert same[:4].all()
    assert not same[4:].any()
