"""The engine's bookkeeping: admission, limits, cancellation, ends. Bits are in tests/invariance."""

from dataclasses import replace

import numpy as np
import pytest

from contract.errors import RequestError
from contract.types import FinishReason, QosClass, Request, SamplingParams, Tenant
from reference.engine import Engine, EngineOptions
from reference.observer import Observer
from tests.engine.small_engine import (
    CONTEXT,
    PAGES,
    SLOTS,
    assert_nothing_is_held,
    events_of,
    request,
)


def test_tokens_come_once_in_order_and_end_with_a_reason(runner):
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


def test_who_waits_for_what_never_comes_fails(runner):
    """The bound of ``conftest.py``: on an idle engine, and on one whose client takes no tokens."""
    for held in (False, True):
        engine = Engine(runner)
        if held:
            engine.submit(request(1))
            engine.stall(1)
        with pytest.raises(AssertionError, match="without a token"):
            next(filter(None, iter(engine.step, None)))


def test_everything_is_free_again_when_idle(runner):
    engine = Engine(runner)
    for number in range(9):
        engine.submit(request(number))
    list(engine.run())
    assert engine.idle
    assert_nothing_is_held(engine)


def test_pages_are_taken_as_sequences_grow(runner):
    """Requests that could need all pages run side by side as long as they do not."""
    engine = Engine(runner)
    for number in range(SLOTS):
        engine.submit(request(number, length=3, max_tokens=90))
    engine.step()
    assert engine.statistics.running == SLOTS
    assert engine.memory.held(0) == SLOTS


def test_who_runs_out_of_pages_is_preempted_and_resumes(kept_runner):
    """Three grow beyond the pool: nobody is lost, and every token is that of the request alone."""
    requests = [request(number, length=20, max_tokens=70) for number in range(4)]
    alone = {}
    for one in requests:
        engine = Engine(kept_runner, EngineOptions(prefix_cache=False))
        engine.submit(one)
        alone[one.id] = [event.token for event in engine.run()]
    for prefix_cache in (False, True):
        engine = Engine(kept_runner, EngineOptions(prefix_cache=prefix_cache))
        for one in requests:
            engine.submit(one)
        events = events_of(engine)
        assert engine.statistics.preempted > 0
        assert set(events) == set(alone)
        for number, produced in events.items():
            assert [event.token for event in produced] == alone[number]
            assert [event.position for event in produced] == list(range(20, 90))
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("most", [None, 0, 2])
def test_so_many_pages_are_kept_for_those_that_begin_alike(runner, most):
    """Of the three whole pages of a request that is gone; who runs can be shared with always."""
    engine = Engine(runner, EngineOptions(cached_pages=most))
    for number in (1, 2):
        engine.submit(replace(request(7, length=50, max_tokens=1), id=number))
        list(engine.run())
    kept = 3 if most is None else most
    assert engine.memory.cached == kept
    assert engine.statistics.prefix.tokens_hit == 16 * kept
    for number in (3, 4):
        engine.submit(replace(request(8, length=50, max_tokens=30), id=number))
        engine.step()
        engine.step()
    assert engine.statistics.prefix.tokens_hit == 16 * (kept + 3)


class Admissions(Observer):
    """Who was admitted, and how much of it the prefix cache had."""

    def __init__(self) -> None:
        self.reused: dict[int, list[int]] = {}

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """See ``Observer``."""
        self.reused.setdefault(request_id, []).append(reused)


def test_who_was_preempted_goes_on_from_the_pages_it_filled(runner):
    """Those of generated tokens, too: of a prompt of 20 tokens only one page is whole."""
    admissions = Admissions()
    engine = Engine(runner, observer=admissions)
    engine.put_tenant(Tenant(1, "batch", qos=QosClass.BATCH))
    engine.put_tenant(Tenant(2, "interactive", qos=QosClass.INTERACTIVE))
    for number in range(SLOTS):
        engine.submit(request(number, length=20, max_tokens=30, tenant=1))
    for _ in range(20):
        engine.step()
    engine.submit(request(9, max_tokens=2, tenant=2))
    list(engine.run())
    again = [reused for first, *later in admissions.reused.values() for reused in later]
    assert again == [32]


def test_what_penalties_look_at_is_computed_not_found(runner):
    """The last 16 tokens of a prompt that is cached: they have to pass through the slot."""
    sampling = SamplingParams(repeat_penalty=1.5, repeat_last_n=16)
    penalized = request(1, length=40, max_tokens=8, sampling=sampling)
    alone = Engine(runner, EngineOptions(prefix_cache=False))
    alone.submit(penalized)
    expected = [event.token for event in alone.run()]
    engine = Engine(runner)
    engine.submit(replace(penalized, sampling=SamplingParams(), id=2))
    list(engine.run())
    engine.submit(penalized)
    assert [event.token for event in engine.run()] == expected
    assert engine.statistics.prefix.tokens_hit == 16


def test_cancel_frees_slot_and_pages_at_once(runner):
    engine = Engine(runner)
    engine.submit(request(1, max_tokens=50))
    engine.submit(request(2, max_tokens=50))
    engine.step()
    engine.cancel(1)
    engine.cancel(99)
    assert engine.statistics.running == 1
    assert engine.memory.held(0) == 1
    assert {e.request_id for e in engine.run()} == {2}


def test_cancel_before_admission(runner):
    engine = Engine(runner)
    for number in range(5):
        engine.submit(request(number))
    engine.cancel(4)
    assert 4 not in events_of(engine)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_tenant_is_removed_when_its_last_request_ended(runner, cancelled):
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


def test_a_tenant_that_comes_back_is_not_removed(runner):
    engine = Engine(runner)
    engine.put_tenant(Tenant(7, "seven"))
    engine.submit(request(1, tenant=7))
    engine.remove_tenant(7)
    engine.put_tenant(Tenant(7, "seven", max_slots=1))
    engine.submit(request(2, tenant=7))
    assert events_of(engine).keys() == {1, 2}
    assert engine.tenants[7].max_slots == 1


def test_end_of_generation_stops_unless_ignored(runner):
    engine = Engine(runner)
    engine.submit(request(1, max_tokens=8))
    tokens = [e.token for e in engine.run()]
    engine = Engine(runner, EngineOptions(end_of_generation=frozenset({tokens[2]})))
    engine.submit(request(1, max_tokens=8))
    first = tokens.index(tokens[2])
    stopped = list(engine.run())
    assert [e.token for e in stopped] == tokens[: first + 1]
    assert stopped[-1].finish_reason is FinishReason.STOP
    engine.submit(request(1, max_tokens=8, ignore_end=True))
    assert [e.token for e in engine.run()] == tokens


def test_the_context_ends_a_request(runner):
    """A sequence may fill the context and no more."""
    engine = Engine(runner)
    engine.submit(request(1, length=CONTEXT - 3, max_tokens=50))
    produced = list(engine.run())
    assert produced[-1].position == CONTEXT - 1
    assert produced[-1].finish_reason is FinishReason.LENGTH


def test_logits_of_every_position_are_handed_over_once(runner):
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


def test_a_broken_sequence_breaks_no_other(runner):
    """A NaN in one sequence's cache ends that sequence with an error; the other is untouched."""
    undisturbed = Engine(runner)
    undisturbed.submit(request(2, max_tokens=6))
    expected = [e.token for e in undisturbed.run()]
    engine = Engine(runner, EngineOptions(page_order=tuple(range(PAGES))))
    engine.submit(request(1, max_tokens=6))
    engine.submit(request(2, max_tokens=6))
    tokens = [e.token for e in engine.step() if e.request_id == 2]
    kv = runner.buffer("state.kv[0]").view(np.float32).reshape(PAGES, 2, 16, -1)
    kv[0, 0, 0] = np.nan
    events = events_of(engine)
    assert events[1][-1].finish_reason is FinishReason.ERROR
    assert tokens + [e.token for e in events[2]] == expected


@pytest.mark.parametrize(("bad", "field"), [
    (request(1, length=0), "prompt"),
    (Request(1, (0, 320), 4), "prompt"),
    (Request(1, (-1,), 4), "prompt"),
    (request(1, length=CONTEXT + 1), "prompt"),
    (request(1, sampling=SamplingParams(temperature=float("nan"))), "temperature"),
    (request(1, sampling=SamplingParams(min_p=-1.0)), "min_p"),
    (request(1, sampling=SamplingParams(repeat_penalty=1.1, repeat_last_n=65)), "repeat_last_n"),
])  # fmt: skip
def test_a_request_that_can_never_run_is_refused(runner, bad, field):
    engine = Engine(runner)
    with pytest.raises(RequestError) as raised:
        engine.submit(bad)
    assert raised.value.field == field
    assert engine.idle


def test_an_id_is_taken_while_its_request_lives(runner):
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
