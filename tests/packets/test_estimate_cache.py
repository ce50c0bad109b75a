"""What steps take is learnt once for everything it follows from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accel.packets import estimate_cache
from accel.packets.estimate_cache import StepMemoryCache, code_state
from accel.packets.footprint import PlannedSteps, StepMemory
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_workers
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Schedule, Step
from contract.dtypes import F16
from contract.errors import UnsupportedOp
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import Model, open_model

LIMITS = Limits(1, 64, 4, F16, step_tokens=24, step_rows=4)
FORMS = shape_buckets(LIMITS.largest)


@pytest.fixture
def model(synthetic_model: Callable[..., Path]) -> Model:
    return open_model(synthetic_model(architecture="qwen3", quant="q4_k_m"))


class Planner:
    """Steps for two workers, by a folder of what was kept; ``scheduled`` are the forms lowered."""

    def __init__(self, folder: Path, *parameters: str | int) -> None:
        self.scheduled: list[ShapeKey] = []
        self.steps = PlannedSteps(self._schedule, known=StepMemoryCache(folder, parameters).of)

    def memory(self, model: Model, limits: Limits = LIMITS) -> StepMemory:
        return self.steps.memory(model.graph(limits), limits.largest)

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        self.scheduled.append(bucket)
        step = lower_graph(graph, bucket, 2, "opencl")
        return step, schedule_workers(step, 2)


def test_a_plan_made_before_lowers_nothing(model: Model, tmp_path: Path) -> None:
    """It is the one that lowering gives; a form is lowered when it is wanted."""
    first, second = Planner(tmp_path), Planner(tmp_path)
    made = first.memory(model)
    assert first.scheduled == list(FORMS)
    assert second.memory(model) == made
    assert second.scheduled == []
    graph = model.graph(LIMITS)
    second.steps.memory(graph, LIMITS.largest)
    second.steps.of(graph, FORMS[1])
    assert second.scheduled == [FORMS[1]]
    first.steps.memory(graph, LIMITS.largest)
    assert len(first.scheduled) == len(FORMS)


@pytest.mark.parametrize("what", ["parameters", "sizes", "graph", "code"])
def test_whatever_it_follows_from_is_asked_for(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Other workers, limits, weights or kernels: another entry."""
    Planner(tmp_path, 2).memory(model)
    planner, limits = Planner(tmp_path, 2), LIMITS
    if what == "parameters":
        planner = Planner(tmp_path, 3)
    elif what == "sizes":
        limits = replace(LIMITS, step_tokens=25)
    elif what == "graph":
        limits = replace(LIMITS, context=65, pages=5)
    else:
        monkeypatch.setattr(estimate_cache, "code_state", lambda: "other")
    planner.memory(model, limits)
    assert planner.scheduled
    assert len(list(tmp_path.iterdir())) == 2


def test_an_entry_that_is_damaged_is_made_again(model: Model, tmp_path: Path) -> None:
    """And where nothing can be kept, nothing is."""
    made = Planner(tmp_path).memory(model)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    planner = Planner(tmp_path)
    assert planner.memory(model) == made
    assert planner.scheduled == list(FORMS)
    assert Planner(entry).memory(model) == made


def test_code_that_is_no_files_keeps_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an archive: nothing tells one version from the next."""
    assert "rules_attention.py" in (code_state() or "")
    monkeypatch.setattr(estimate_cache, "code_state", lambda: None)
    Planner(tmp_path).memory(model)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_lowered_is_not_kept(model: Model, tmp_path: Path) -> None:
    """The next one meets the same error."""

    def refuse(graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        raise UnsupportedOp("opencl", "SAMPLE")

    steps = PlannedSteps(refuse, known=StepMemoryCache(tmp_path, ()).of)
    for _ in range(2):
        with pytest.raises(UnsupportedOp):
            steps.memory(model.graph(LIMITS), LIMITS.largest)
    assert list(tmp_path.iterdir()) == []
