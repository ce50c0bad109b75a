"""The engine's bookkeeping: admission, limits, cancellation, ends. Bits are in tests/invariance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import RequestError
from contract.types import FinishReason, Request, SamplingParams, TokenEvent
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import Capacity, ModelRunner, Submission

SLOTS = 3
PAGES = 12
CONTEXT = 96


@pytest.fixture
def runner(tiny_model_path: Path) -> Iterator[ModelRunner]:
    limits = Limits(slots=SLOTS, context=CONTEXT, pages=PAGES)
    model = open_model(tiny_model_path)
    with (
        model.file,
        CpuTier() as tier,
        ModelRunner(model, tier, limits, Capacity(32, 16)) as runner,
    ):
        yield runner


@pytest.fixture(scope="module")
def fed_runner(tiny_model_path: Path) -> Iterator[ModelRunner]:
    """One runner for many engines: what an engine leaves behind must not matter."""
    model = open_model(tiny_model_path)
    limits = Limits(slots=SLOTS, context=CONTEXT, pages=PAGES)
    with (
        model.file,
        CpuTier() as tier,
        ModelRunner(model, tier, limits, Capacity(32, 16)) as runner,
    ):
        yield runner


def request(number: int, length: int = 5, max_tokens: int = 4, **fields: object) -> Request:
    prompt = tuple((number * 31 + i * 7) % 256 for i in range(length))
    return Request(number, prompt, max_tokens, **fields)  # type: ignore[arg-type]


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
    assert engine.pool.free == PAGES
    assert (engine.pool.meta["ref_count"] == 0).all()


def test_a_request_waits_for_pages_and_keeps_its_place(runner: ModelRunner) -> None:
    """The pool holds two of these at a time although there are three slots."""
    engine = Engine(runner)
    for number in range(4):
        engine.submit(request(number, length=60, max_tokens=30))
    first = engine.step()
    assert engine.pool.free == 0
    finished = [e.request_id for e in [*first, *engine.run()] if e.finish_reason]
    assert sorted(finished) == [0, 1, 2, 3]
    assert set(finished[:2]) == {0, 1}


def test_cancel_frees_slot_and_pages_at_once(runner: ModelRunner) -> None:
    engine = Engine(runner)
    engine.submit(request(1, max_tokens=50))
    engine.submit(request(2, max_tokens=50))
    engine.step()
    engine.cancel(1)
    engine.cancel(99)
    assert engine.pool.free == PAGES - len(range(0, 55, 16))
    assert {e.request_id for e in engine.run()} == {2}


def test_cancel_before_admission(runner: ModelRunner) -> None:
    engine = Engine(runner)
    for number in range(5):
        engine.submit(request(number))
    engine.cancel(4)
    assert 4 not in events_of(engine)


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


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_feeding_on_the_device_changes_no_token(
    fed_runner: ModelRunner, data: st.DataObject
) -> None:
    """Any requests joining and leaving at any time: the tokens are those of single steps."""
    requests = [
        request(
            number,
            length=data.draw(st.integers(1, 9)),
            max_tokens=data.draw(st.integers(1, 12)),
            sampling=SamplingParams(
                temperature=data.draw(st.sampled_from((0.0, 1.5))),
                repeat_penalty=data.draw(st.sampled_from((1.0, 1.4))),
                frequency_penalty=data.draw(st.sampled_from((0.0, 0.6))),
                repeat_last_n=data.draw(st.integers(0, 8)),
                seed=number,
            ),
        )
        for number in range(data.draw(st.integers(1, 5)))
    ]
    joins = {r.id: data.draw(st.integers(0, 6)) for r in requests}
    cancels = {r.id: data.draw(st.integers(1, 40)) for r in requests}
    end = frozenset(data.draw(st.sets(st.integers(0, 255), max_size=30)))
    expected = _tokens(fed_runner, requests, joins, cancels={}, end=end, steps_ahead=0)
    ahead = data.draw(st.integers(1, 3))
    assert _tokens(fed_runner, requests, joins, {}, end, ahead) == expected
    for number, tokens in _tokens(fed_runner, requests, joins, cancels, end, ahead).items():
        assert tokens == expected[number][: len(tokens)]


def test_steps_are_fed_while_nothing_else_is_to_do(
    fed_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and eleven tokens: two inputs from the host, the other nine steps without it."""
    submitted, fed = [], []
    submit, feed = fed_runner.submit, fed_runner.feed
    monkeypatch.setattr(fed_runner, "submit", lambda i: submitted.append(1) or submit(i))
    monkeypatch.setattr(fed_runner, "feed", lambda s: fed.append(1) or feed(s))
    engine = Engine(fed_runner, steps_ahead=1)
    engine.submit(request(1, max_tokens=11))
    assert len(list(engine.run())) == 11
    assert (len(submitted), len(fed)) == (2, 9)


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT - 6, 50), (9, 7)])
def test_nothing_is_fed_beyond_the_last_token(
    fed_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, length: int, max_tokens: int
) -> None:
    """A position without a page would be written wherever the page table happens to point."""
    positions = []
    feed = fed_runner.feed

    def observed(before: Submission) -> Submission:
        submission = feed(before)
        positions.extend(submission.query["position"].tolist())
        return submission

    monkeypatch.setattr(fed_runner, "feed", observed)
    engine = Engine(fed_runner, steps_ahead=3)
    engine.submit(request(1, length=length, max_tokens=max_tokens))
    last = list(engine.run())[-1].position
    assert positions == list(range(length + 1, last))


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
    assert engine.pool.free == PAGES
    return tokens
