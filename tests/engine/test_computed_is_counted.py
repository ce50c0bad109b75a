"""What was computed counts towards the rates of a tenant, whatever became of the request."""

from collections.abc import Callable

import pytest

from contract.types import Request, Tenant, TokenEvent
from reference.observer import Observer, StepObservation
from reference.sched.rates import BUCKETS_PER_SECOND, WINDOW_SECONDS
from tests.engine.adversaries import engine_of, until

pytestmark = pytest.mark.usefixtures("finite_logits")

RATE = 100
CHUNK = 32
SECONDS = 40.0
When = Callable[[int], bool]


class Positions(Observer):
    """How many positions steps computed."""

    def __init__(self) -> None:
        self.computed = 0

    def step(self, step: StepObservation) -> None:
        self.computed += sum(count for _, _, count in step.chunks)


def computed(steps_ahead: int, tokens: int, when: When, *, prefix: bool = True) -> float:
    """Positions a second of a client that cancels after the steps of which ``when`` says so and
    asks anew, the same or something else."""
    positions = Positions()
    engine, clock = engine_of(
        Tenant(1, "one", prefill_tokens_per_s=RATE, decode_tokens_per_s=RATE),
        steps_ahead=steps_ahead, chunk=CHUNK, slots=1, observer=positions,
    )  # fmt: skip
    number, steps, document, submitted = 0, 0, 0, [0]
    submit = engine.runner.submit

    def counted(inputs: object) -> object:
        submitted[0] += len(inputs.query)  # type: ignore[attr-defined]
        return submit(inputs)  # type: ignore[arg-type]

    engine.runner.submit = counted  # type: ignore[method-assign, assignment]

    def ask() -> None:
        nonlocal number
        number += 1
        prompt = tuple((document * 37 + i * 11) % 1000 for i in range(300))
        engine.submit(Request(number, prompt, tokens, tenant=1, ignore_end=True))

    def each(events: list[TokenEvent]) -> None:
        nonlocal steps, document
        steps += 1
        document += not prefix or engine.progress(number) > 250
        if engine.progress(number) and when(steps):
            engine.cancel(number)
        if engine.idle:
            ask()

    ask()
    until(engine, clock, SECONDS, each)
    return submitted[0] / SECONDS


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("when", [lambda step: True, lambda step: step % 3 == 0], ids=["1", "3"])
def test_who_cancels_after_each_step_computes_no_more_than_its_rate(steps_ahead, prefix, when):
    """Above it at most by what one admission begins in each window: the steps under way."""
    begun = (steps_ahead + 3) * CHUNK / (WINDOW_SECONDS + 1 / BUCKETS_PER_SECOND)
    assert computed(steps_ahead, 8, when, prefix=prefix) <= RATE + begun


def test_what_is_dropped_uncounted_passes_the_rate(monkeypatch):
    """Negative control: only steps that are read and whose request is still there are counted."""
    monkeypatch.setattr("reference.engine.pipeline.Pipeline._count", lambda self, step: None)
    begun = 6 * CHUNK / WINDOW_SECONDS
    assert computed(3, 8, lambda step: True) > RATE + begun


@pytest.mark.parametrize("steps_ahead", [0, 3])
def test_every_position_is_counted_once(steps_ahead):
    engine, _ = engine_of(Tenant(1, "one"), steps_ahead=steps_ahead)
    for number in (1, 2):
        prompt = tuple(range(number * 100, number * 100 + 70))
        engine.submit(Request(number, prompt, 10, tenant=1, ignore_end=True))
    events = list(engine.run())
    usage = engine.tenants.usage(1)
    assert usage.decode_tokens_per_s * WINDOW_SECONDS == len(events) == 20
    assert usage.prefill_tokens_per_s * WINDOW_SECONDS == 2 * 69
