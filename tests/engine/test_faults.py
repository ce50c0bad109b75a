"""Whatever fails and wherever it is interrupted: nobody is lost, nothing is kept, every token comes
once."""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest

from contract.errors import DeviceLost
from contract.types import FinishReason, QosClass, Request, Tenant, TokenEvent
from harness.simulation.history import solo_run
from harness.simulation.runner import SimulatedCopies
from reference.engine import Engine
from reference.engine.drafter import PromptLookup
from reference.engine.output_processor import OutputProcessor
from tests.engine.adversaries import engine_of
from tests.simulation.test_adversaries import who_is_in_between_is_lost

pytestmark = pytest.mark.usefixtures("finite_logits")

CALM, HURRIED = (
    Tenant(1, "calm", qos=QosClass.BATCH),
    Tenant(2, "hurried", qos=QosClass.INTERACTIVE),
)
CONTEXT = 128


def assert_all_given_back(engine: Engine) -> None:
    assert engine.idle
    engine.memory.check([])
    for tenant in engine.tenants:
        assert engine.tenants.usage(tenant.id)[:3] == (0, 0, 0)
        assert not engine.memory.held(tenant.id)


class Failing:
    """The copies to the host whose numbers are given fail."""

    def __init__(self, patch: pytest.MonkeyPatch, *numbers: int) -> None:
        self.count = 0
        save = SimulatedCopies.save

        def failing(copies: SimulatedCopies, page: int) -> Any:
            self.count += 1
            if self.count in numbers:
                raise DeviceLost("a copy failed")
            return save(copies, page)

        patch.setattr(SimulatedCopies, "save", failing)


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("cached_pages", [None, 1])
def test_a_copy_that_fails_loses_nobody(number, cached_pages, monkeypatch):
    """While a preempted sequence is released, or while room is made: who ran goes on."""
    failing = Failing(monkeypatch, number)
    engine, _ = engine_of(
        CALM, HURRIED, pages=10, context=CONTEXT, host_pages=20, cached_pages=cached_pages
    )
    requests = [
        Request(n, tuple(range(n, n + 50)), 20, tenant=1, ignore_end=True) for n in (1, 2, 3)
    ]
    for request in requests:
        engine.submit(request)
    tokens: dict[int, list[int]] = {}
    failures = 0
    for step in range(400):
        if step in (6, 30):
            urgent = Request(
                100 + step, tuple(range(step, step + 60)), 9, tenant=2, ignore_end=True
            )
            requests.append(urgent)
            engine.submit(urgent)
        try:
            events = engine.step()
        except DeviceLost:
            failures += 1
            continue
        for event in events:
            tokens.setdefault(event.request_id, []).append(event.token)
        if engine.idle and step > 30:
            break
    assert failing.count >= number
    assert failures == 1
    for request in requests:
        expected = [event.token for event in solo_run(request, CONTEXT).events]
        assert tokens[request.id] == expected
    assert_all_given_back(engine)


def test_a_copy_that_fails_in_a_cancel_gives_everything_back(monkeypatch):
    engine, _ = engine_of(CALM, pages=10, context=CONTEXT, host_pages=20, cached_pages=1)
    for n in (1, 2):
        engine.submit(Request(n, tuple(range(n, n + 50)), 20, tenant=1, ignore_end=True))
    for _ in range(8):
        engine.step()
    Failing(monkeypatch, 1)
    with pytest.raises(DeviceLost):
        engine.cancel(1)
    rest = list(engine.run())
    assert {event.request_id for event in rest} == {2}
    assert len(rest) + engine.usage.of(1).tokens_generated >= 20
    assert engine.usage.of(1).requests_finished == {
        FinishReason.CANCELLED: 1,
        FinishReason.LENGTH: 1,
    }
    assert_all_given_back(engine)


def test_a_device_that_fails_for_good_ends_its_requests(monkeypatch):
    Failing(monkeypatch, *range(1, 1000))
    engine, _ = engine_of(CALM, pages=10, context=CONTEXT, host_pages=20, cached_pages=0)
    for n in (1, 2, 3):
        engine.submit(Request(n, tuple(range(n, n + 50)), 20, tenant=1, ignore_end=True))
    ends = []
    for _ in range(200):
        try:
            ends += [event for event in engine.step() if event.finish_reason is not None]
        except DeviceLost:
            continue
        if engine.idle:
            break
    assert {event.request_id for event in ends} == {1, 2, 3}
    assert_all_given_back(engine)


# Interrupts at any line of the product.


class Interrupt:
    """Raises KeyboardInterrupt before the line of this number is run in ``reference``."""

    def __init__(self, at: int) -> None:
        self.lines, self.at = 0, at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/reference/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def during(self, function: Callable[[], list[TokenEvent]]) -> list[TokenEvent]:
        gc.disable()
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(None)
            gc.enable()


def interrupted(seed: int, most: int, **options: Any) -> tuple[Engine, int]:
    """Play some requests with up to ``most`` interrupts at random lines of steps; checks that each
    gets its tokens once. The engine, and how often it was interrupted."""
    random = Random(seed)
    engine, _ = engine_of(CALM, HURRIED, pages=12, context=CONTEXT, chunk=24, **options)
    requests: list[Request] = []
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    times, delivered = 0, {1: 0, 2: 0}
    for step in range(500):
        if step < 40 and random.random() < 0.2:
            prompt = tuple(range(random.randint(1, 40), random.randint(41, 90)))
            request = Request(
                len(requests) + 1, prompt, random.choice([1, 5, 30]), tenant=random.choice([1, 2]),
                ignore_end=True,
            )  # fmt: skip
            requests.append(request)
            engine.submit(request)
        try:
            if times < most and random.random() < 0.2:
                events = Interrupt(random.choice([3, 40, 900]) * random.randint(1, 9)).during(
                    engine.step
                )
            else:
                events = engine.step()
        except KeyboardInterrupt:
            times += 1
            events = []
        for event in events:
            assert event.request_id not in ends
            tokens.setdefault(event.request_id, []).append(event.token)
            tenant = requests[event.request_id - 1].tenant
            delivered[tenant] += event.token >= 0
            if event.finish_reason is not None:
                ends[event.request_id] = event.finish_reason
        if step > 40 and engine.idle:
            break
    for request in requests:
        expected = [event.token for event in solo_run(request, CONTEXT).events]
        assert tokens[request.id] == expected
    for tenant, count in delivered.items():
        assert engine.usage.of(tenant).tokens_generated == count
        finished = sum(request.tenant == tenant for request in requests)
        assert sum(engine.usage.of(tenant).requests_finished.values()) == finished
    assert_all_given_back(engine)
    return engine, times


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "ahead": {"steps_ahead": 3},
    "host": {"host_pages": 9, "cached_pages": 2, "copy_pages": True},
    "hybrid": {"recurrent": True, "saved_states": 3}, "guesses": {"drafter": None},
}  # fmt: skip


def play_interrupted(kind: str, seeds: range) -> int:
    times = 0
    for seed in seeds:
        options = dict(OPTIONS[kind])
        if kind == "guesses":
            options = {"drafter": PromptLookup()}
        times += interrupted(seed, 6, **options)[1]
    return times


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_interrupt_at_any_line_spoils_nothing(kind):
    assert play_interrupted(kind, range(25)) > 40


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", OPTIONS)
def test_interrupts_for_long(kind):
    assert play_interrupted(kind, range(1000, 3000)) > 4000


def make_room(at: int, *, urgent: bool = True) -> None:
    """Interrupt a step before the line of a number; checks that everybody gets all tokens once. In
    the step a sequence is preempted and another admitted, or without an ``urgent`` one it
    decodes."""
    engine, _ = engine_of(CALM, HURRIED, slots=1, pages=12, context=CONTEXT, chunk=24)
    first = Request(1, tuple(range(40)), 12, tenant=1, ignore_end=True)
    second = Request(2, tuple(range(50, 80)), 4, tenant=2, ignore_end=True)
    tokens: dict[int, list[int]] = {1: [], 2: []}
    engine.submit(first)
    for _ in range(5):
        for event in engine.step():
            tokens[event.request_id].append(event.token)
    if urgent:
        engine.submit(second)
    try:
        events = Interrupt(at).during(engine.step)
    except KeyboardInterrupt:
        events = []
    for _ in range(100):
        for event in events:
            tokens[event.request_id].append(event.token)
        events = engine.step()
    for request in (first, second)[: 1 + urgent]:
        expected = [event.token for event in solo_run(request, CONTEXT).events]
        assert tokens[request.id] == expected
        assert engine.usage.of(request.tenant).tokens_generated == len(expected)
    assert_all_given_back(engine)


def make_room_at(lines: range, *, urgent: bool = True) -> None:
    for at in lines:
        make_room(at, urgent=urgent)


@pytest.mark.parametrize("first", range(1, 8))
def test_an_interrupt_while_room_is_made(first):
    make_room_at(range(first, 1200, 7))


@pytest.mark.parametrize("first", range(1, 4))
def test_an_interrupt_while_a_token_is_taken(first):
    make_room_at(range(first, 600, 3), urgent=False)


def test_who_is_lost_between_running_and_waiting_is_noticed(monkeypatch):
    """Negative control: after an interrupt only those are looked for that ran or waited."""
    who_is_in_between_is_lost(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        make_room_at(range(1, 1200, 5))


def test_a_token_that_its_sequence_forgets_is_noticed(monkeypatch):
    """Negative control: tokens that are about to be handed out are not looked at again."""
    monkeypatch.setattr(OutputProcessor, "apply_batch", lambda self, live: [])
    with pytest.raises((AssertionError, KeyError)):
        make_room_at(range(200, 600), urgent=False)


def test_a_tenant_that_is_removed_before_an_engine_recovers(monkeypatch):
    """An end of a request and its recovery that are interrupted leave its slot held for a step."""
    engine, _ = engine_of(CALM, HURRIED, pages=10, context=CONTEXT)
    for n in (1, 2):
        engine.submit(Request(n, tuple(range(n, n + 50)), 20, tenant=n, ignore_end=True))
        engine.step()

    def interrupted(*how: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "finished", interrupted)
        patch.setattr(engine, "_recover", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.cancel(1)
    assert engine.tenants.usage(1).slots == 1
    engine.remove_tenant(1)
    rest = list(engine.run())
    assert ({e.request_id for e in rest}, [t.id for t in engine.tenants]) == ({2}, [2])
    assert_all_given_back(engine)


# Sinks that cancel.


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_a_sink_that_cancels_its_own_request(max_tokens, steps_ahead):
    engine, _ = engine_of(CALM, steps_ahead=steps_ahead, context=CONTEXT)
    engine.submit(
        Request(1, tuple(range(50)), max_tokens, tenant=1, ignore_end=True),
        lambda start, logits: engine.cancel(1) if start + len(logits) >= 50 else None,
    )
    assert list(engine.run()) == []
    assert engine.usage.of(1).tokens_generated == 0
    assert engine.usage.of(1).requests_finished == {FinishReason.CANCELLED: 1}
    assert_all_given_back(engine)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("position", [10, 12])
def test_a_sink_that_cancels_a_neighbour(order, tokens, position):
    """Whether the neighbour's event of the same step is pending or not yet made, its last one
    among them: no event follows, and the usage is what was handed out."""
    engine, _ = engine_of(CALM, HURRIED, steps_ahead=1, context=CONTEXT)
    requests = {
        1: Request(1, tuple(range(10)), 20, tenant=1, ignore_end=True),
        2: Request(2, tuple(range(20, 30)), tokens, tenant=2, ignore_end=True),
    }
    gone = False

    def sink(start: int, logits: object) -> None:
        nonlocal gone
        if start >= position - 1:
            engine.cancel(2)
            gone = True

    for number in order:
        engine.submit(requests[number], sink if number == 1 else None)
    delivered = {1: 0, 2: 0}
    while not engine.idle:
        before = gone
        for event in engine.step():
            assert not (before and event.request_id == 2)
            delivered[event.request_id] += event.token >= 0
    for tenant, count in delivered.items():
        assert engine.usage.of(tenant).tokens_generated == count
        assert sum(engine.usage.of(tenant).requests_finished.values()) == 1
    assert_all_given_back(engine)


def test_a_sink_that_removes_its_tenant():
    engine, _ = engine_of(CALM, HURRIED, context=CONTEXT)
    seen: list[int] = []

    def sink(start: int, logits: object) -> None:
        if not seen:
            engine.remove_tenant(1)
            engine.put_tenant(replace(CALM, name="another"))
        seen.append(start)

    engine.submit(Request(1, tuple(range(50)), 9, tenant=1, ignore_end=True), sink)
    (event,) = engine.run()
    assert event.finish_reason is FinishReason.ERROR
    assert engine.tenants[1].name == "another"
    assert_all_given_back(engine)
