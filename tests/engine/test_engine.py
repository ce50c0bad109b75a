"""The engine's bookkeeping: admission, limits, cancellation, ends. Bits are in tests/invariance."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import RequestError
from contract.tier import Tier
from contract.types import FinishReason, Request, SamplingParams, Tenant, TokenEvent
from harness.tiers import open_tier
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner, StepInput, Submission
from tests.late_tier import LateTier
from tests.needs import need_device

SLOTS = 3
PAGES = 12
CONTEXT = 96


LIMITS = Limits(slots=SLOTS, context=CONTEXT, pages=PAGES, step_tokens=32, step_rows=16)


@pytest.fixture
def runner(tiny_model_path: Path) -> Iterator[ModelRunner]:
    model = open_model(tiny_model_path)
    with model.file, CpuTier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        yield runner


TIERS: dict[str, Callable[[], Tier]] = {
    "cpu": CpuTier,
    "late": LateTier,
    "opencl": lambda: need_device(partial(open_tier, "opencl")),
    "cuda": lambda: need_device(partial(open_tier, "cuda")),
}


@pytest.fixture(scope="module", params=TIERS)
def kept_runner(request: pytest.FixtureRequest, tiny_model_path: Path) -> Iterator[ModelRunner]:
    """One runner for many engines: what an engine leaves behind must not matter."""
    model = open_model(tiny_model_path)
    with (
        model.file,
        TIERS[request.param]() as tier,
        ModelRunner(model, tier, LIMITS) as runner,
    ):
        yield runner


def request(number: int, length: int = 5, max_tokens: int = 4, **fields: object) -> Request:
    prompt = tuple((number * 31 + i * 7) % 256 for i in range(length))
    return Request(number, prompt, max_tokens, **fields)  # type: ignore[arg-type]


def assert_nothing_is_held(engine: Engine) -> None:
    """Every page is free or only the prefix cache's."""
    engine.memory.check([])
    assert engine.memory.free + engine.memory.cached == PAGES
    assert (engine.memory.meta["ref_count"] == 0).all()


def events_of(engine: Engine) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {}
    for event in engine.run():
        events.setdefault(event.request_id, []).append(event)
    return events


def test_tokens_come_once_in_order_and_end_with_a_reason(runner: ModelRunner) -> None:
    """Positions are consecutive from the end of the prompt; only the last event has a reason."""
    engine = Engine(runner)
    for number in range(7):
        engine.submit(request(number, length=3 + number, max_tokens=2 + number))
    events = events_of(engine)
    assert sorted(events) == list(range(7))
    for number, produced in events.items():
        assert [e.position for e in produced] == list(range(3 + number, 5 + 2 * number))
        assert [e.finish_reason for e in produced[:-1]] == [None] * (1 + number)
        assert produced[-1].finish_reason is FinishReason.LENGTH


def test_everything_is_free_again_when_idle(runner: ModelRunner) -> None:
    engine = Engine(runner)
    for number in range(9):
        engine.submit(request(number))
    list(engine.run())
    assert engine.idle
    assert_nothing_is_held(engine)


def test_pages_are_taken_as_sequences_grow(runner: ModelRunner) -> None:
    """Requests that could need all pages run side by side as long as they do not."""
    engine = Engine(runner)
    for number in range(SLOTS):
        engine.submit(request(number, length=3, max_tokens=90))
    engine.step()
    assert engine.statistics.running == SLOTS
    assert engine.memory.held(0) == SLOTS


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_who_runs_out_of_pages_is_preempted_and_resumes(
    kept_runner: ModelRunner, prefix_cache: bool
) -> None:
    """Three grow beyond the pool: nobody is lost, and every token is that of the request alone."""
    requests = [request(number, length=20, max_tokens=70) for number in range(4)]
    alone = {}
    for one in requests:
        engine = Engine(kept_runner, prefix_cache=prefix_cache)
        engine.submit(one)
        alone[one.id] = [event.token for event in engine.run()]
    engine = Engine(kept_runner, prefix_cache=prefix_cache)
    for one in requests:
        engine.submit(one)
    events = events_of(engine)
    assert engine.statistics.preempted > 0
    for number, produced in events.items():
        assert [event.token for event in produced] == alone[number]
        assert [event.position for event in produced] == list(range(20, 90))
    assert_nothing_is_held(engine)


def test_cancel_frees_slot_and_pages_at_once(runner: ModelRunner) -> None:
    engine = Engine(runner)
    engine.submit(request(1, max_tokens=50))
    engine.submit(request(2, max_tokens=50))
    engine.step()
    engine.cancel(1)
    engine.cancel(99)
    assert engine.statistics.running == 1
    assert engine.memory.held(0) == 1
    assert {e.request_id for e in engine.run()} == {2}


def test_cancel_before_admission(runner: ModelRunner) -> None:
    engine = Engine(runner)
    for number in range(5):
        engine.submit(request(number))
    engine.cancel(4)
    assert 4 not in events_of(engine)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_tenant_is_removed_when_its_last_request_ended(
    runner: ModelRunner, cancelled: bool
) -> None:
    """What it had reserved is free at once, its requests end as always, new ones are refused."""
    engine = Engine(runner)
    engine.put_tenant(Tenant(7, "seven", reserved_pages=8))
    engine.submit(request(1, tenant=7))
    engine.step()
    engine.remove_tenant(7)
    with pytest.raises(RequestError, match="7 was removed"):
        engine.submit(request(2, tenant=7))
    engine.submit(request(3, length=60, max_tokens=CONTEXT))
    assert 7 in engine.tenants
    if cancelled:
        engine.cancel(1)
        assert 7 not in engine.tenants
    assert (1 in events_of(engine)) is not cancelled
    assert 7 not in engine.tenants
    assert_nothing_is_held(engine)
    with pytest.raises(RequestError):
        engine.remove_tenant(7)


def test_a_tenant_that_comes_back_is_not_removed(runner: ModelRunner) -> None:
    engine = Engine(runner)
    engine.put_tenant(Tenant(7, "seven"))
    engine.submit(request(1, tenant=7))
    engine.remove_tenant(7)
    engine.put_tenant(Tenant(7, "seven", max_slots=1))
    engine.submit(request(2, tenant=7))
    assert events_of(engine).keys() == {1, 2}
    assert engine.tenants[7].max_slots == 1


def test_end_of_generation_stops_unless_ignored(runner: ModelRunner) -> None:
    engine = Engine(runner)
    engine.submit(request(1, max_tokens=8))
    tokens = [e.token for e in engine.run()]
    engine = Engine(runner, end_of_generation=frozenset({tokens[2]}))
    engine.submit(request(1, max_tokens=8))
    first = tokens.index(tokens[2])
    stopped = list(engine.run())
    assert [e.token for e in stopped] == tokens[: first + 1]
    assert stopped[-1].finish_reason is FinishReason.STOP
    engine.submit(request(1, max_tokens=8, ignore_end=True))
    assert [e.token for e in engine.run()] == tokens


def test_the_context_ends_a_request(runner: ModelRunner) -> None:
    """A sequence may fill the context and no more."""
    engine = Engine(runner)
    engine.submit(request(1, length=CONTEXT - 3, max_tokens=50))
    produced = list(engine.run())
    assert produced[-1].position == CONTEXT - 1
    assert produced[-1].finish_reason is FinishReason.LENGTH


def test_logits_of_every_position_are_handed_over_once(runner: ModelRunner) -> None:
    """More positions than a step has rows: they come in chunks that join without a gap."""
    chunks: list[tuple[int, np.ndarray]] = []
    engine = Engine(runner)
    engine.submit(
        request(1, length=40, max_tokens=0), lambda first, logits: chunks.append((first, logits))
    )
    (last,) = engine.run()
    assert last.token == -1
    assert last.finish_reason is FinishReason.LENGTH
    assert [first for first, _ in chunks] == [0, 16, 32]
    assert sum(len(logits) for _, logits in chunks) == 40


def test_a_broken_sequence_breaks_no_other(runner: ModelRunner) -> None:
    """A NaN in one sequence's cache ends that sequence with an error; the other is untouched."""
    undisturbed = Engine(runner)
    undisturbed.submit(request(2, max_tokens=6))
    expected = [e.token for e in undisturbed.run()]
    engine = Engine(runner, page_order=range(PAGES))
    engine.submit(request(1, max_tokens=6))
    engine.submit(request(2, max_tokens=6))
    tokens = [e.token for e in engine.step() if e.request_id == 2]
    kv = runner.buffer("state.kv[0]").view(np.float32).reshape(PAGES, 2, 16, -1)
    kv[0, 0, 0] = np.nan
    events = events_of(engine)
    assert events[1][-1].finish_reason is FinishReason.ERROR
    assert tokens + [e.token for e in events[2]] == expected


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(1, length=0), "prompt"),
        (Request(1, (0, 320), 4), "prompt"),
        (Request(1, (-1,), 4), "prompt"),
        (request(1, length=CONTEXT + 1), "prompt"),
        (request(1, sampling=SamplingParams(temperature=float("nan"))), "temperature"),
        (request(1, sampling=SamplingParams(min_p=-1.0)), "min_p"),
        (
            request(1, sampling=SamplingParams(repeat_penalty=1.1, repeat_last_n=65)),
            "repeat_last_n",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    runner: ModelRunner, bad: Request, field: str
) -> None:
    engine = Engine(runner)
    with pytest.raises(RequestError) as raised:
        engine.submit(bad)
    assert raised.value.field == field
    assert engine.idle


def test_an_id_is_taken_while_its_request_lives(runner: ModelRunner) -> None:
    """Events are told apart by it, so a second one is refused, waiting or running."""
    engine = Engine(runner)
    engine.submit(request(1, max_tokens=2))
    for _ in range(2):
        with pytest.raises(RequestError, match="still under way") as raised:
            engine.submit(request(1))
        assert raised.value.field == "id"
        engine.step()
    assert engine.idle
    engine.submit(request(1, max_tokens=1))
    engine.cancel(1)
    engine.submit(request(1, max_tokens=3))
    assert [event.request_id for event in engine.run()] == [1, 1, 1]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_steps_under_way_change_no_token(kept_runner: ModelRunner, data: st.DataObject) -> None:
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
def test_prefill_and_decode_are_queued_alike(tiny_model_path: Path, steps_ahead: int) -> None:
    """Six requests on three slots, waiting, prefilling and decoding: the queue is always full."""
    model = open_model(tiny_model_path)
    with model.file, LateTier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner, steps_ahead=steps_ahead)
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
def test_nothing_is_computed_beyond_the_last_token(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, length: int, max_tokens: int
) -> None:
    """A position without a page would be written wherever the page table happens to point."""
    positions: list[int] = []
    submit = runner.submit

    def observed(inputs: StepInput) -> Submission:
        positions.extend(inputs.query["position"].tolist())
        return submit(inputs)

    monkeypatch.setattr(runner, "submit", observed)
    engine = Engine(runner, steps_ahead=3)
    engine.submit(request(1, length=length, max_tokens=max_tokens))
    last = list(engine.run())[-1].position
    assert positions == list(range(last))


def test_an_interrupted_step_spoils_nothing(
    kept_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at any point of a step: what ran goes on in the next, every bit as before, and no
    slot or page is lost."""
    quiet = Engine(kept_runner, steps_ahead=2)
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
                engine = Engine(kept_runner, steps_ahead=2)
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


def test_no_call_inside_a_step_swallows_an_interrupt(tiny_model_path: Path) -> None:
    """A Ctrl-C is raised in whatever Python function runs next; code in C that calls one may drop
    what it raises, as numpy does while it makes a dtype."""
    model = open_model(tiny_model_path)
    with model.file, CpuTier(threads=1) as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner)

        def decoding() -> Callable[[], object]:
            engine.submit(request(1, max_tokens=60))
            for _ in range(3):
                engine.step()
            return engine.step

        calls = _calls_of(decoding())
        engine.cancel(1)
        assert calls > 100
        for number in range(1, calls - 2, max(1, calls // 100)):
            with pytest.raises(KeyboardInterrupt):
                _calls_of(decoding(), interrupted_at=number)
            assert engine.statistics.running == 0
            engine.cancel(1)
            assert engine.idle
            assert_nothing_is_held(engine)


def _calls_of(function: Callable[[], object], interrupted_at: int = -1) -> int:
    """How many Python functions run; the one of that number raises KeyboardInterrupt."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if count == interrupted_at + 1:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
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
    runner: ModelRunner,
    requests: list[Request],
    joins: dict[int, int],
    cancels: dict[int, int],
    end: frozenset[int],
    steps_ahead: int,
) -> dict[int, list[int]]:
    """Tokens of each request; joins and cancels happen before the step of that number."""
    engine = Engine(runner, end_of_generation=end, steps_ahead=steps_ahead)
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
