"""A timeline is valid, shows every decision of an engine once, and nothing overlaps in it."""

import json
from itertools import pairwise
from typing import Any

import pytest

from contract.errors import ConfigError
from contract.types import FinishReason, Request, Tenant
from harness.trace.timeline import SLOTS, STEPS, TENANTS, Timeline
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.observer import StepObservation
from reference.runner import ModelRunner
from reference.sched.planner import Chunk
from reference.sched.tenants import Tenants
from tests.late_tier import LateTier
from tests.sched.manual_clock import ManualClock

LIMITS = Limits(slots=3, context=96, pages=9, step_tokens=32, step_rows=16)
Events = list[dict[str, Any]]


class Ticking(ManualClock):
    """Every look at it takes a millisecond."""

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(scope="module", params=[0, 3])
def events(request, tiny_model_path, tmp_path_factory) -> Events:
    """Seven requests of two tenants in memory for two or three, one of them cancelled."""
    path = tmp_path_factory.mktemp("timelines") / "timeline.json"
    model, clock = open_model(tiny_model_path), Ticking()
    tier = LateTier() if request.param else CpuTier()
    tenants = Tenants((Tenant(0, "zero"), Tenant(1, "one")), clock=clock)
    with model.file, tier, ModelRunner(model, tier, LIMITS) as runner, Timeline(path) as timeline:
        engine = Engine(
            runner, EngineOptions(steps_ahead=request.param), clock=clock, tenants=tenants,
            observer=timeline,
        )  # fmt: skip
        for number in range(7):
            prompt = tuple((number * 31 + 7 * n) % 256 for n in range(20 + 3 * number))
            requested = Request(number, prompt, 30, tenant=number % 2, ignore_end=True)
            engine.submit(requested)
        for _ in range(6):
            engine.step()
        engine.cancel(1)
        list(engine.run())
        assert engine.statistics.preempted > 0
    return json.loads(path.read_text())


def of(events: Events, group: int, *phases: str) -> Events:
    """Events of a group, by time."""
    found = [e for e in events if e["pid"] == group and e["ph"] in phases]
    return sorted(found, key=lambda event: event["ts"])


def test_steps_follow_each_other(events):
    """Every step once, none before the one before it ended; every token in one of them."""
    steps = of(events, STEPS, "X")
    assert [step["args"]["number"] for step in steps] == list(range(len(steps)))
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"]
    assert sum(step["args"]["decode"] for step in steps) >= 6 * 29
    assert sum(step["args"]["prefill"] for step in steps) > 0


def test_slots_hold_one_request_at_a_time(events):
    """Occupations are closed before others begin, and chunks lie inside the one they are for."""
    for slot in range(LIMITS.slots):
        held = None
        for event in [e for e in events if e["pid"] == SLOTS and e["tid"] == slot]:
            if event["ph"] == "B":
                assert held is None
                held = event
            elif event["ph"] == "E":
                assert held is not None
                assert event["ts"] >= held["ts"]
                held = None
            elif event["ph"] == "X":
                assert held is not None
                assert event["ts"] >= held["ts"]
        assert held is None


def test_a_request_waits_runs_and_ends(events):
    """States follow each other without a gap; the last one has the reason."""
    for number in range(7):
        states = [e for e in events if e["pid"] == TENANTS and e.get("id") == number]
        assert {event["tid"] for event in states} == {number % 2}
        assert [event["ph"] for event in states] == ["b", "e"] * (len(states) // 2)
        begins, ends = states[::2], states[1::2]
        assert [b["name"] for b in begins] == [e["name"] for e in ends]
        assert {b["name"] for b in begins[::2]} == {"waiting"}
        for end, begin in zip(ends, begins[1:], strict=False):
            assert begin["ts"] >= end["ts"]
        reasons = [e["args"]["finish_reason"] for e in ends if "finish_reason" in e.get("args", {})]
        assert reasons == ["cancelled" if number == 1 else "length"]
        assert "finish_reason" in ends[-1]["args"]
    assert any("preempted" in e.get("args", {}) for e in of(events, TENANTS, "e"))


def test_what_is_computed_for_nobody_is_said(tmp_path):
    """A chunk of a request that left, or that came back after the step was submitted."""
    path = tmp_path / "timeline.json"
    chunks = [Chunk(0, 5, 1), Chunk(1, 5, 1)]
    with Timeline(path) as timeline:
        for number in (1, 2):
            timeline.submitted(0.0, Request(number, (1, 2), 9))
        timeline.admitted(3.0, 1, 0, 2, 0)
        timeline.step(StepObservation(0, 2.0, 4.0, chunks, (1, 2), 0, 0, 0))
        timeline.step(StepObservation(1, 3.5, 5.0, chunks, (1, 2), 0, 0, 0))
        timeline.finished(6.0, 1, 0, FinishReason.STOP)
        timeline.finished(6.0, 2, None, FinishReason.CANCELLED)
    events = json.loads(path.read_text())
    first, second = (event["args"] for event in of(events, STEPS, "X"))
    assert (first["decode"], first["unused"]) == (0, 2)
    assert (second["decode"], second["unused"]) == (1, 1)
    assert [event["ts"] for event in of(events, SLOTS, "X")] == [4_000_000]


def test_a_file_in_the_way_is_kept(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        Timeline(path)
    assert path.read_text() == "mine"
