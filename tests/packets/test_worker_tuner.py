"""The number of workers, chosen on synthetic machines, and what steps take: no device."""

import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.packets import estimate_cache
from accel.packets.estimate_cache import StepMemoryCache, code_state
from accel.packets.footprint import PlannedSteps, StepMemory
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_workers
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Schedule, Step
from accel.packets.worker_tuner import (
    MAX_GAP,
    SINGLE_SIZES,
    AdaptiveWorkers,
    WorkerTuner,
    candidates,
    size_class,
)
from contract.dtypes import F16
from contract.errors import UnsupportedOp
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import Model, open_model

Machine = Callable[[int], float]
"""Seconds of a step by its number of workers."""

DECODE = 1
OPS = 800


def alone(workers: int) -> float:
    """Nobody else is there."""
    return 10.0 / workers


def beside_two(workers: int) -> float:
    """Each barrier of several workers waits out a time slice, as measured on two cores."""
    return 20.0 if workers == 1 else 400.0


def run(
    adaptive: AdaptiveWorkers, machine: Machine, steps: int, ahead: int = 0, tokens: int = DECODE
) -> float:
    """Seconds of ``steps``; each is chosen when ``ahead`` before it are not yet noted."""
    seconds = 0.0
    queued: deque[tuple[int, float]] = deque()
    for _ in range(steps):
        workers = adaptive.choose(tokens, OPS)
        queued.append((workers, machine(workers)))
        seconds += queued[-1][1]
        if len(queued) > ahead:
            adaptive.note(tokens, OPS, *queued.popleft())
    for one in queued:
        adaptive.note(tokens, OPS, *one)
    return seconds


def best(machine: Machine, most: int, steps: int) -> float:
    """Seconds with the best fixed number."""
    return steps * min(machine(workers) for workers in range(1, most + 1))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 8, 64])
def test_alone_next_to_nothing_is_lost(most, ahead):
    steps = 4000
    assert run(AdaptiveWorkers(most), alone, steps, ahead) <= 1.01 * best(alone, most, steps)


@settings(deadline=None)
@given(st.integers(1, 9), st.sampled_from([1.5, 3.0, 10.0]))
def test_a_hiccup_now_and_then_changes_nothing(seed, length):
    """One step in fifty takes longer, on an otherwise idle machine."""
    chance = random.Random(seed)
    hiccups = [alone(2) * (length - 1) * (chance.random() < 0.02) for _ in range(3000)]
    pending = iter(hiccups)
    seconds = run(AdaptiveWorkers(2), lambda workers: alone(workers) + next(pending), len(hiccups))
    assert seconds <= 1.03 * (alone(2) * len(hiccups) + sum(hiccups))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_load_that_starts_is_noticed_within_a_few_steps(ahead):
    adaptive = AdaptiveWorkers(2)
    run(adaptive, alone, 1000, ahead)
    run(adaptive, beside_two, 30, ahead)
    assert adaptive.workers == 1


def trials(ahead: int, seed: int) -> float:
    """The share of steps with another number than is best, where each takes another time."""
    chance, adaptive, chosen = random.Random(seed), AdaptiveWorkers(2), []

    def machine(workers: int) -> float:
        chosen.append(workers)
        return alone(workers) * chance.lognormvariate(0.0, 0.4)

    run(adaptive, machine, 4000, ahead)
    return chosen[1000:].count(1) / 3000


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_steps_that_differ_anyway_bring_no_trials_forward(ahead, monkeypatch):
    """A trial is a step that takes longer, so they shall be hardly more than those that take longer
    anyway."""
    assert sum(trials(ahead, seed) for seed in range(9)) / 9 < 0.015
    monkeypatch.setattr("accel.packets.worker_tuner.BEYOND_SPREAD", 0.0)
    assert sum(trials(ahead, seed) for seed in range(9)) / 9 > 0.025


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_fewer_workers_are_found_where_steps_are_cut_into_slices(ahead):
    """Any of several workers may wait for the slices of another process, one hardly ever does."""
    parts = []
    for seed in range(9):
        chance = random.Random(seed)

        def sliced(workers: int, chance: random.Random = chance) -> float:
            seconds = 2 * alone(workers)
            while chance.random() < (0.75 if workers > 1 else 0.1):
                seconds += chance.uniform(0.0, 12.0)
            return seconds

        parts.append(
            run(AdaptiveWorkers(2), sliced, 4000, ahead) / run(AdaptiveWorkers(1), sliced, 4000)
        )
    assert sum(parts) / 9 < 1.08


def slower_by(block_ops: int, seed: int) -> float:
    """How many times as long as with the best number of workers the steps of a model and of its
    draft block take, which come in any order; two workers are best for both."""
    adaptive, spent, ideal, chance = AdaptiveWorkers(2), 0.0, 0.0, random.Random(seed)
    for _ in range(2000):
        ops, usual = (OPS, 25e-3) if chance.random() < 0.3 else (block_ops, 1.7e-3)
        workers = adaptive.choose(DECODE, ops)
        seconds = usual * (1.0 if workers == 2 else 1.7)
        adaptive.note(DECODE, ops, workers, seconds)
        spent, ideal = spent + seconds, ideal + usual
    return spent / ideal


def test_steps_of_two_graphs_are_told_apart():
    """The control: graphs of as many ops are not."""
    assert all(slower_by(41, seed) < 1.03 < 1.15 < slower_by(OPS, seed) for seed in range(5))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_beside_a_load_trials_cost_little(ahead):
    adaptive = AdaptiveWorkers(2)
    run(adaptive, beside_two, 100, ahead)
    steps = 4000
    assert run(adaptive, beside_two, steps, ahead) <= 1.08 * best(beside_two, 2, steps)


@pytest.mark.parametrize("most", [2, 4, 6, 64])
def test_all_workers_return_when_the_load_ends(most):
    adaptive = AdaptiveWorkers(most)
    run(adaptive, lambda workers: 10.0 * workers, 500)
    assert adaptive.workers == 1
    run(adaptive, alone, 40 * MAX_GAP)
    assert adaptive.workers == most


@example(most=3, free=1, ahead=0, noise=0.0, seed=0)
@example(most=64, free=1, ahead=3, noise=0.1, seed=0)
@example(most=48, free=2, ahead=0, noise=0.1328125, seed=2)
@example(most=54, free=39, ahead=0, noise=0.0, seed=0)
@settings(deadline=None)
@given(
    most=st.integers(1, 65),
    free=st.integers(1, 65),
    ahead=st.integers(0, 3),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 9),
)
def test_some_free_cores_are_found(most, free, ahead, noise, seed):
    """Up to ``free`` workers share the work; with more, each waits for a busy core."""
    chance = random.Random(seed)

    def machine(workers: int) -> float:
        seconds = 10.0 / workers if workers <= free else 15.0 / free + 0.1 * workers
        return seconds * chance.uniform(1 - noise, 1 + noise)

    adaptive = AdaptiveWorkers(most)
    run(adaptive, machine, 1500, ahead)
    steps = 3000
    ideal = steps * min(10.0 / min(most, free), 15.0 / free + 0.1 * most if most > free else 1e9)
    assert run(adaptive, machine, steps, ahead) <= ideal / 0.8


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=300), st.integers(1, 65), st.integers(-9, 9)
)
def test_the_choice_is_in_range_and_knows_no_unit_of_time(seconds, most, power):
    one, other = AdaptiveWorkers(most), AdaptiveWorkers(most)
    for value in seconds:
        workers = one.choose(DECODE, OPS)
        assert 1 <= workers <= most
        assert other.choose(DECODE, OPS) == workers
        one.note(DECODE, OPS, workers, value)
        other.note(DECODE, OPS, workers, value * 2.0**power)


@given(most=st.integers(2, 300), workers=st.integers(1, 300), downward=st.booleans())
def test_trials_reach_one_all_and_the_neighbours(most, workers, downward):
    workers = min(workers, most)
    found = candidates(workers, most, downward)
    assert set(found) | {workers} >= {1, most}
    assert set(found) >= {n for n in (workers - 1, workers + 1) if 1 <= n <= most}
    assert len(found) == len(set(found)) <= 4 * most.bit_length() + 2
    assert all(1 <= number <= most for number in found)
    assert workers not in found
    room = workers > 1 if downward else workers < most
    assert not room or (found[0] < workers) == downward


def test_a_prompt_is_no_slow_decode_step():
    adaptive = AdaptiveWorkers(2)
    for _ in range(40):
        run(adaptive, alone, 20)
        run(adaptive, lambda workers: 300 * alone(workers), 1, tokens=512)
    assert adaptive.workers == 2
    assert all(worker_tuner.workers == 2 for worker_tuner in adaptive.by_size.values())
    assert size_class(1) < size_class(2) < size_class(SINGLE_SIZES) < size_class(100)
    assert size_class(100) == size_class(127) < size_class(128)


def test_a_new_size_begins_as_the_last_one_stands():
    adaptive = AdaptiveWorkers(2)
    run(adaptive, beside_two, 100)
    assert adaptive.choose(7, OPS) == 1


def test_a_bad_trial_is_one_step_whatever_is_queued():
    worker_tuner = WorkerTuner(max_workers=2, workers=1)
    tried = []
    for _ in range(8):
        workers = worker_tuner.choose()
        tried.append(workers == 2)
        worker_tuner.note(workers, beside_two(workers))
    assert tried.count(True) == 1
    worker_tuner = WorkerTuner(max_workers=2, workers=1)
    for _ in range(4):
        worker_tuner.note(1, 20.0)
    assert [worker_tuner.choose() for _ in range(4)] == [2, 1, 1, 1]


LIMITS = Limits(1, 64, 4, F16, step_tokens=24, step_rows=4)
BUCKETS = shape_buckets(LIMITS.largest)


@pytest.fixture
def model(synthetic_model) -> Model:
    return open_model(synthetic_model(architecture="qwen3", quant="q4_k_m"))


class Planner:
    """Steps for two workers with a cache in ``folder``; ``scheduled`` are the buckets lowered."""

    def __init__(self, folder: Path, *parameters: str | int) -> None:
        self.scheduled: list[ShapeKey] = []
        self.steps = PlannedSteps(self._schedule, cache=StepMemoryCache(folder, parameters).of)

    def memory(self, model: Model, limits: Limits = LIMITS) -> StepMemory:
        return self.steps.memory(model.graph(limits), limits.largest)

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        self.scheduled.append(bucket)
        step = lower_graph(graph, bucket, 2, "opencl")
        return step, schedule_workers(step, 2)


def test_cached_memory_lowers_nothing(model, tmp_path):
    """The cached memory is that which lowering gives; a bucket is lowered when it is needed."""
    first, second = Planner(tmp_path), Planner(tmp_path)
    made = first.memory(model)
    assert first.scheduled == list(BUCKETS)
    assert second.memory(model) == made
    assert second.scheduled == []
    graph = model.graph(LIMITS)
    second.steps.memory(graph, LIMITS.largest)
    second.steps.of(graph, BUCKETS[1])
    assert second.scheduled == [BUCKETS[1]]
    first.steps.memory(graph, LIMITS.largest)
    assert len(first.scheduled) == len(BUCKETS)


@pytest.mark.parametrize("what", ["parameters", "sizes", "graph", "code"])
def test_whatever_it_follows_from_is_asked_for(model, tmp_path, monkeypatch, what):
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


def test_an_entry_that_is_damaged_is_made_again(model, tmp_path):
    """And where nothing can be kept, nothing is."""
    made = Planner(tmp_path).memory(model)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    planner = Planner(tmp_path)
    assert planner.memory(model) == made
    assert planner.scheduled == list(BUCKETS)
    assert Planner(entry).memory(model) == made


def test_code_that_is_no_files_keeps_nothing(model, tmp_path, monkeypatch):
    """As in an archive: nothing tells one version from the next."""
    assert "rules_experts.py" in (code_state() or "")
    monkeypatch.setattr(estimate_cache, "code_state", lambda: None)
    Planner(tmp_path).memory(model)
    assert list(tmp_path.iterdir()) == []


def test_code_of_the_same_size_and_time_is_other_code(tmp_path):
    """As images of containers and packages have it, whose files are all of one time."""
    package = ModuleType("lowering")
    package.__path__ = [str(tmp_path)]
    module = tmp_path / "rules.py"

    def state(text: str) -> str | None:
        module.write_text(text)
        os.utime(module, ns=(10**18, 10**18))
        return code_state.__wrapped__((package,))

    before, changed = state("ROWS = 16\n"), module.stat().st_ctime_ns
    after = state("ROWS = 32\n")
    while module.stat().st_ctime_ns == changed:
        # The clock of the file system has not moved on.
        after = state("ROWS = 32\n")
    assert after != before


def test_a_graph_that_cannot_be_lowered_is_not_cached(model, tmp_path):
    """The next one meets the same error."""

    def refuse(graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        raise UnsupportedOp("opencl", "SAMPLE")

    steps = PlannedSteps(refuse, cache=StepMemoryCache(tmp_path, ()).of)
    for _ in range(2):
        with pytest.raises(UnsupportedOp):
            steps.memory(model.graph(LIMITS), LIMITS.largest)
    assert list(tmp_path.iterdir()) == []
