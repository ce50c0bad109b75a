"""What batch work leaves of an interactive tenant's decode intervals, by the planner's own doing:
on a device whose steps take exactly what they cost, in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.types import QosClass
from harness.bench.serving.plan import ServingPlan
from harness.bench.serving.together import interactive_intervals
from harness.simulation import history
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner, StepSeconds
from reference.engine import pipeline

MOST_SPREAD = 1.3
"""Of the interval that 99 % stay below, over the median."""
DEVICES = {
    "two cores": StepSeconds(fixed=6.6e-3, token=1.4e-3, attended=1e-6),
    "reads weights": StepSeconds(fixed=6e-3, token=2e-5, attended=1e-8),
}
"""What steps of the default model were measured to take, and where tokens cost next to nothing."""


def spread(seconds: StepSeconds, *, batch: bool) -> float:
    """The 99th percentile over the median."""
    plan = ServingPlan(Path("none"), ("none",), threads=1)
    clock = VirtualClock()
    runner = SimulatedRunner(plan.limits, clock, seconds=seconds)
    intervals = interactive_intervals(runner, plan, batch=batch, clock=clock)  # type: ignore[arg-type]
    half, most = np.percentile(intervals, [50, 99])
    return float(most / half)


@pytest.fixture(autouse=True)
def finite_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request ends because its logits are not finite, as some do in simulated schedules."""
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_work_spreads_the_intervals_little(device: str) -> None:
    assert spread(DEVICES[device], batch=False) < 1.05
    assert spread(DEVICES[device], batch=True) <= MOST_SPREAD


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_any_size_would_spread_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a planner to which the interactive class is as good as any other."""
    monkeypatch.setitem(pipeline.INTERVAL_RATIO, QosClass.INTERACTIVE, 30.0)
    assert spread(DEVICES[device], batch=True) > MOST_SPREAD
