"""What batch work leaves of an interactive tenant's decode intervals, by the planner's own doing:
on devices whose steps take exactly what they cost, in virtual time."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from contract.types import QosClass
from harness.bench.serving.concurrent import interactive_intervals
from harness.bench.serving.plan import ServingPlan
from harness.simulation.clock import VirtualClock
from harness.simulation.device import StepCopy
from harness.simulation.runner import SimulatedRunner, StepSeconds
from reference.engine import scheduler
from reference.sched import planner, step_time_curve

pytestmark = pytest.mark.usefixtures("finite_logits")

MAX_SPREAD = 1.3
"""Of the interval that 99 % stay below, over the median."""
MEASURED = (
    {1: 2.8, 2: 3.2, 3: 3.6, 4: 3.7, 5: 4.2, 6: 4.4, 7: 4.9, 8: 5.0, 9: 6.3, 10: 6.7, 11: 7.1}
    | {12: 7.2, 13: 7.3, 14: 7.4, 15: 7.6, 16: 7.7, 17: 8.6, 20: 9.5, 24: 11.0, 25: 12.2, 28: 12.9}
    | {32: 14.4, 33: 19.0, 40: 22.5, 48: 26.0, 56: 31.0, 64: 34.5, 72: 37.5, 104: 57.0, 528: 270.0}
)
"""Milliseconds of a step by its tokens, rows of logits not counted: the least of many of the
default model on the opencl tier, two Zen 5 cores."""


@dataclass(frozen=True, slots=True)
class MeasuredSeconds(StepSeconds):
    """Steps of the default model: MEASURED, and so much for a row of logits."""

    attended: float = 4e-7
    row: float = 0.12e-3

    def of(self, step: StepCopy) -> float:
        tokens = len(step.query)
        attended = sum([position for _, _, position, _ in step.query]) + tokens
        taken = float(np.interp(tokens, list(MEASURED), list(MEASURED.values()))) * 1e-3
        return taken + self.row * len(step.rows) + self.attended * attended


@dataclass(frozen=True, slots=True)
class TiledSeconds(StepSeconds):
    """Tokens cost as many as fill the last tile."""

    tile: int = 1

    def of(self, step: StepCopy) -> float:
        tokens = len(step.query)
        missing = -tokens % self.tile
        return StepSeconds.of(self, step) + self.token * missing


DEVICES = {
    "two cores": StepSeconds(fixed=6.6e-3, token=1.4e-3, attended=1e-6),
    "reads weights": StepSeconds(fixed=6e-3, token=2e-5, attended=1e-8),
    "measured": MeasuredSeconds(),
    "tiles of 8": TiledSeconds(fixed=6.6e-3, token=1.4e-3, attended=1e-6, tile=8),
    "tiles of 16": TiledSeconds(fixed=2e-3, token=1.4e-3, attended=1e-6, tile=16),
    "tiles of 32": TiledSeconds(fixed=2e-3, token=6e-4, attended=1e-6, tile=32),
}
LENGTHS = {"as long": (50, 50), "answers": (16, 64), "prompts": (150, 50)}
"""A quarter of the longest prompts and answers of the batch tenant."""


class Found(NamedTuple):
    """Seconds between tokens of the interactive request, and the batch tenant's tokens a second
    meanwhile, prompts included."""

    intervals: list[float]
    batch_rate: float

    @property
    def spread(self) -> float:
        half, most = np.percentile(self.intervals, [50, 99])
        return float(most / half)


def measured(
    seconds: StepSeconds, lengths: tuple[int, int] = (50, 50), *, batch: bool = True
) -> Found:
    """What an interactive tenant gets, beside a batch tenant or alone."""
    prompt, answer = lengths
    plan = ServingPlan(
        Path("none"), ("none",), threads=1, prompt_tokens=prompt, decode_tokens=answer
    )
    clock = VirtualClock()
    runner = SimulatedRunner(plan.limits, clock, seconds=seconds)
    steps: list[int] = []
    runner.watch = lambda step: steps.append(len(step.query))
    intervals = interactive_intervals(runner, plan, batch=batch, clock=clock)  # type: ignore[arg-type]
    tokens = sum(steps[-len(intervals) :]) - len(intervals)
    return Found(intervals, tokens / sum(intervals))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_batch_work_spreads_the_intervals_little(device, lengths):
    assert measured(DEVICES[device], batch=False).spread < 1.05
    assert measured(DEVICES[device], LENGTHS[lengths]).spread <= MAX_SPREAD


@pytest.mark.parametrize("device", ["two cores", "measured"])
def test_chunks_of_any_size_would_spread_them(device, monkeypatch):
    """The control: a planner to which the interactive class is as good as any other."""
    monkeypatch.setitem(scheduler.INTERVAL_RATIO, QosClass.INTERACTIVE, 30.0)
    assert measured(DEVICES[device]).spread > MAX_SPREAD


def test_knowing_the_stairs_is_shorter_and_more(monkeypatch):
    """The control of the curve: planned by a straight line, steps begin a tile for little of it,
    under a ratio within which a tile lies by that line."""
    monkeypatch.setitem(scheduler.INTERVAL_RATIO, QosClass.INTERACTIVE, 1.3)
    device, lengths = DEVICES["tiles of 16"], LENGTHS["answers"]
    found = measured(device, lengths)
    monkeypatch.setattr(step_time_curve, "FACTOR_MAX", 1.0)
    plain = measured(device, lengths)
    assert np.median(plain.intervals) > 1.5 * np.median(found.intervals)
    assert found.batch_rate > 1.2 * plain.batch_rate


def test_prefill_in_one_step_would_be_a_long_one(monkeypatch):
    """The control of the spreading: most steps only decode here, and a prompt fits one step, under
    a ratio that leaves room for one."""
    monkeypatch.setitem(scheduler.INTERVAL_RATIO, QosClass.INTERACTIVE, 1.2)
    device, lengths = DEVICES["reads weights"], LENGTHS["answers"]
    found = measured(device, lengths)
    monkeypatch.setattr(planner, "SPREAD_STEPS", 1)
    assert found.spread < 1.15 < measured(device, lengths).spread


@pytest.mark.parametrize("device", ["reads weights", "measured", "tiles of 32"])
def test_batch_work_goes_on_beside_it(device, monkeypatch):
    """Where prompts are long, an interactive tenant leaves the batch tenant a good part of what it
    would have beside a tenant of its own class."""
    beside = measured(DEVICES[device], LENGTHS["prompts"]).batch_rate
    monkeypatch.delitem(scheduler.INTERVAL_RATIO, QosClass.INTERACTIVE)
    assert beside > 0.2 * measured(DEVICES[device], LENGTHS["prompts"]).batch_rate
