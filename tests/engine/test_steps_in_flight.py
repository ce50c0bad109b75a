"""Steps queued ahead and steps interrupted change no token and lose nothing."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.types import Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.model.open import open_model
from reference.runner import ModelRunner, StepInput, Submission
from tests.engine.small_engine import CONTEXT, LIMITS, SLOTS, assert_nothing_is_held, request
from tests.late_tier import LateTier
from tests.named_tiers import quick_tier


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_steps_under_way_change_no_token(kept_runner, data):
    """Any requests joining, leaving and stopping at any time: the tokens are those of single
    steps, however many are under way."""
    requests = [
        request(
            number,
            length=data.draw(st.integers(1, 40)),
            max_tokens=data.draw(st.integers(0, 12)),
            sampling=SamplingParams(
                temperature=data.draw(st.sampled_from((0.0, 1.5))),
                repeat_penalty=data.draw(st.sampled_from((1.0, 1.4))),
                frequency_penalty=data.draw(st.sampled_from((0.0, 0.6))),
                repeat_last_n=data.draw(st.integers(0, 64)),
                seed=number,
            ),
        )
        for number in range(data.draw(st.integers(1, 5)))
    ]
    joins = {r.id: data.draw(st.integers(0, 6)) for r in requests}
    cancels = {r.id: data.draw(st.integers(1, 40)) for r in requests}
    end = frozenset(data.draw(st.sets(st.integers(0, 255), max_size=30)))
    expected = _tokens(kept_runner, requests, joins, cancels={}, end=end, steps_ahead=0)
    ahead = data.draw(st.integers(1, 3))
    assert _tokens(kept_runner, requests, joins, {}, end, ahead) == expected
    for number, tokens in _tokens(kept_runner, requests, joins, cancels, end, ahead).items():
        assert tokens == expected[number][: len(tokens)]


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_prefill_and_decode_are_queued_alike(tiny_model_path, steps_ahead):
    """Six requests on three slots, waiting, prefilling and decoding: the queue is always full."""
    model = open_model(tiny_model_path)
    with model.file, LateTier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner, EngineOptions(steps_ahead=steps_ahead))
        for number in range(6):
            engine.submit(request(number, length=20 + number, max_tokens=9))
        engine.step()
        while not engine.idle:
            assert len(tier.queue) == steps_ahead
            engine.step()
            if engine.statistics.running < SLOTS:
                break
        assert tier.longest == steps_ahead + 1


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT - 6, 50), (9, 7)])
def test_nothing_is_computed_beyond_the_last_token(runner, monkeypatch, length, max_tokens):
    """A position without a page would be written wherever the page table happens to point."""
    positions: list[int] = []
    submit = runner.submit

    def observed(inputs: StepInput) -> Submission:
        positions.extend(inputs.query["position"].tolist())
        return submit(inputs)

    monkeypatch.setattr(runner, "submit", observed)
    engine = Engine(runner, EngineOptions(steps_ahead=3))
    engine.submit(request(1, length=length, max_tokens=max_tokens))
    last = list(engine.run())[-1].position
    assert positions == list(range(last))


def test_an_interrupted_step_spoils_nothing(kept_runner, monkeypatch):
    """Ctrl-C at any point of a step: what ran goes on in the next, every bit as before, and no
    slot or page is lost."""
    quiet = Engine(kept_runner, EngineOptions(steps_ahead=2))
    quiet.submit(request(9, length=30, max_tokens=6))
    expected = [event.token for event in quiet.run()]
    for owner, name in (
        (kept_runner.tier, "submit"),
        (kept_runner.tier, "wait"),
        (kept_runner, "submit"),
        (kept_runner, "collect"),
    ):
        for after in (False, True):
            for at in (1, 3, 5):
                engine = Engine(kept_runner, EngineOptions(steps_ahead=2))
                engine.submit(request(9, length=30, max_tokens=6))
                tokens: list[int] = []
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, _interrupted(getattr(owner, name), at, after))
                    with pytest.raises(KeyboardInterrupt):
                        tokens.extend(event.token for event in engine.run())
                assert engine.statistics.running == 0
                tokens += [event.token for event in engine.run()]
                assert tokens == expected, (name, after, at)
                assert_nothing_is_held(engine)


def test_no_call_inside_a_step_swallows_an_interrupt(tiny_model_path):
    """A Ctrl-C is raised in whatever Python function runs next; code in C that calls one may drop
    what it raises, as numpy does while it makes a dtype."""
    model = open_model(tiny_model_path)
    with model.file, quick_tier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner)

        def decoding() -> Callable[[], object]:
            engine.submit(request(1, max_tokens=60))
            for _ in range(3):
                engine.step()
            return engine.advance

        def counted() -> int:
            calls = _calls_of(decoding())
            engine.cancel(1)
            return calls

        # Classes are compiled when they have made some objects; a step takes fewer calls then.
        calls = min(counted() for _ in range(12))
        assert calls > 100
        # Before the call of number 2 the step has not begun.
        for number in range(2, calls - 2, max(1, calls // 100)):
            with pytest.raises(KeyboardInterrupt):
                _calls_of(decoding(), interrupted_at=number)
            assert engine.statistics.running == 0
            engine.cancel(1)
            assert engine.idle
            assert_nothing_is_held(engine)


def _calls_of(function: Callable[[], object], interrupted_at: int = -1) -> int:
    """How many Python functions run; the one of that number raises KeyboardInterrupt. Finalizers of
    garbage, which may run anywhere and from which nothing is raised, wait meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if count == interrupted_at + 1:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def _interrupted(call: Callable[..., Any], at: int, after: bool) -> Callable[..., Any]:
    """``call``, with a KeyboardInterrupt before or after it is done for the ``at``-th time."""
    count = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        result = call(*arguments, **options) if after or count != at else None
        if count == at:
            raise KeyboardInterrupt
        return result

    return interrupted


def _tokens(
    runner: ModelRunner, requests: list[Request], joins: dict[int, int], cancels: dict[int, int],
    end: frozenset[int], steps_ahead: int,
) -> dict[int, list[int]]:  # fmt: skip
    """Tokens of each request; joins and cancels happen before the step of that number."""
    engine = Engine(runner, EngineOptions(end_of_generation=end, steps_ahead=steps_ahead))
    tokens: dict[int, list[int]] = {r.id: [] for r in requests}
    step = 0
    while step <= max(joins.values()) or not engine.idle:
        for r in requests:
            if joins[r.id] == step:
                engine.submit(r)
            if cancels.get(r.id) == step:
                engine.cancel(r.id)
        if not engine.idle:
            for event in engine.step():
                tokens[event.request_id].append(event.token)
        step += 1
    assert_nothing_is_held(engine)
    return tokens
