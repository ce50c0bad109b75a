"""Other programs take memory of the device and free it: pages, then weights, leave the device and
come back while requests run, and no bit of an answer changes."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.vulkan.tier import VulkanTier
from contract.dtypes import F16
from contract.errors import ModelFileError, OutOfMemory
from contract.tier import StreamsWeights, Tier
from contract.types import Request
from harness import memory
from harness.host.live_memory import FREE_SECONDS, RETRY_SECONDS, SHORT_POLLS, LiveMemory
from harness.residency import plan_residency
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.memory.planner import plan_memory
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.model_runs import FEW, Outcome, assert_same
from tests.tiers.conftest import each
from tests.tiers.test_streaming import REQUESTS, model_of

LIMITS = Limits(3, 96, 18, F16, step_tokens=32, step_rows=32)
FEWEST = LIMITS.slot_pages
LEFT = 1 - 1 / memory.MARGIN_PARTS
"""The part of free memory that a model may take where no margin is too small."""
SMALL = 4096
"""Bytes that tests of allocation allow for rounding."""
mainly = pytest.mark.parametrize("way", each("opencl-banked"), indirect=True, scope="module")
ORACLES: dict[tuple[str, bool], Outcome] = {}


class Machine:
    """A model on a device with memory to spare, of which other programs take some; and a clock."""

    def __init__(self, model: Model, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.tier = model, tier
        self.first = plan_residency(model, tier, [lambda _: LIMITS], LIMITS.context, 1 << 40)
        self.nbytes = 4 * self.first.plan.budgeted
        self.taken, self.seconds = 0, 0.0
        self.waited: list[float] = []
        self.empty()
        self.before = tier.allocated_bytes
        monkeypatch.setattr(memory, "MARGIN_BYTES", 0)
        monkeypatch.setattr(type(tier), "available_bytes", property(lambda _: self.available))

    @property
    def available(self) -> int:
        """What is free on the device now."""
        return max(0, self.nbytes - (self.tier.allocated_bytes - self.before) - self.taken)

    def empty(self) -> None:
        """Have the tier free all that nobody uses."""
        gc.collect()
        assert isinstance(self.tier, StreamsWeights)
        self.tier.stream(self.model.graph(LIMITS), ())

    def leave(self, budget: int) -> None:
        """Have other programs leave ``budget`` bytes to the model."""
        self.taken = self.nbytes - int((budget + 1) / LEFT)

    def bytes_of(self, pages: int, *, streams: bool = False) -> int:
        """Bytes of the device with so many pages, and all weights or the fewest."""
        limits = replace(LIMITS, pages=pages)
        graph = self.model.graph(limits)
        footprint = self.tier.footprint(graph, limits.largest)
        if streams:
            assert isinstance(self.tier, StreamsWeights)
            names = list(self.tier.streamable(graph, limits.largest))
            footprint = self.tier.streaming_footprint(graph, limits.largest, names)
        return plan_memory(graph, limits, footprint, unified=False).budgeted

    def watch(self, runner: ModelRunner) -> LiveMemory:
        """What follows the free memory of a runner."""
        return LiveMemory(runner, self.first, clock=lambda: self.seconds, wait=self.waited.append)

    def look(self, live: LiveMemory, engine: Engine, seconds: float = 1.0) -> None:
        """Look as often as something is done about too little memory."""
        for _ in range(SHORT_POLLS):
            self.seconds += seconds
            live.look(engine)


@pytest.fixture
def machine_of(tier, synthetic_model, monkeypatch) -> Iterator[Callable[[str], Machine]]:
    made: list[Machine] = []

    def machine(name: str) -> Machine:
        made.append(Machine(model_of(synthetic_model, name), tier, monkeypatch))
        return made[-1]

    yield machine
    for one in made:
        one.empty()


@pytest.fixture
def copied(synthetic_model, tmp_path) -> Path:
    """A model file that a test may change."""
    return Path(shutil.copy(model_of(synthetic_model, "dense").file.path, tmp_path))


def run(
    model: Model,
    runner: ModelRunner,
    requests: tuple[Request, ...],
    between: Callable[[Engine, int], None] = lambda engine, tokens: None,
) -> Outcome:
    """Tokens and logits of requests that run together; ``between`` is called after each step with
    the number of tokens so far."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    logits: dict[int, list[NDArray[np.float32]]] = {request.id: [] for request in requests}
    engine = Engine(runner, EngineOptions(end_of_generation=frozenset(), chunk_tokens=20))
    for request in requests:
        sink = logits[request.id]
        engine.submit(request, on_logits=lambda _, rows, sink=sink: sink.extend(rows.copy()))
    while not engine.idle:
        for event in engine.step():
            tokens[event.request_id].append(event.token)
        between(engine, sum(map(len, tokens.values())))
        engine.memory.check()
    return tokens, logits


def expected_of(model: Model, name: str, requests: tuple[Request, ...]) -> Outcome:
    key = name, requests is FEW
    if key not in ORACLES:
        with CpuTier() as cpu, ModelRunner(model, cpu, LIMITS) as runner:
            ORACLES[key] = run(model, runner, requests)
    return ORACLES[key]


def given_and_taken(machine: Machine, requests: tuple[Request, ...], spare: int = 0) -> Outcome:
    """The outcome of requests meanwhile fewer pages, then fewer weights, then all of both are on
    the device, each after a part of the tokens. The tier allocates up to ``spare`` bytes that its
    plan does not count."""
    model, tier = machine.model, machine.tier
    pages, weights = machine.bytes_of(FEWEST), machine.bytes_of(FEWEST, streams=True)
    left = pages + spare, (pages + weights) // 2, 2 * machine.bytes_of(LIMITS.pages)
    total = sum(request.max_tokens for request in requests)
    done: list[tuple[int, bool, int]] = []
    with ModelRunner(model, tier, LIMITS) as runner:
        runner.prepare()
        live = machine.watch(runner)

        def between(engine: Engine, tokens: int) -> None:
            if len(done) < len(left) and tokens >= (len(done) + 1) * total // (len(left) + 2):
                machine.look(live, engine)
                machine.leave(left[len(done)])
                machine.look(live, engine)
                machine.look(live, engine, FREE_SECONDS)
                now = live.now
                done.append((runner.limits.pages, bool(now.streamed), live.changes))
                held = tier.allocated_bytes - machine.before
                assert held <= now.plan.allocated + spare + SMALL, (
                    "the device has what was given back"
                )
                assert live.given_back == machine.first.plan.budgeted - now.plan.budgeted
                assert (live.given_back > 0) == (len(done) < len(left))

        found = run(model, runner, requests, between)
    assert done[0][0] < LIMITS.pages
    assert done[1:] == [(FEWEST, True, 2), (LIMITS.pages, False, 3)]
    assert done[0][1:] == (False, 1)
    assert not machine.waited
    return found


@pytest.mark.parametrize(("way", "name"), [
    *(("opencl-banked", name) for name in ("dense", "hybrid", "mixture")),
    ("vulkan-own-memory", "dense"),
], indirect=["way"], scope="module")  # fmt: skip
def test_memory_is_given_back_and_taken_again(tier, machine_of, name, caplog):
    """No bit changes, and each change is said in a line."""
    machine = machine_of(name)
    requests = FEW if isinstance(tier, VulkanTier) else REQUESTS
    assert_same(expected_of(machine.model, name, requests), given_and_taken(machine, requests))
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[1].split()[0] for line in said] == ["gave", "gave", "took"]


@pytest.mark.parametrize("failures", [1, len(RETRY_SECONDS), len(RETRY_SECONDS) + 1])
@mainly
def test_memory_that_is_taken_between_plan_and_allocation(tier, machine_of, monkeypatch, failures):
    """It is planned again after a while. Where others take all of it, the error says so, and the
    tier has what it had before."""
    machine, alloc, refused = machine_of("dense"), type(tier).alloc, []

    def alloc_but(self: Any, decl: Any, nbytes: int) -> Any:
        if machine.taken and len(refused) < failures:
            refused.append(decl.name)
            raise OutOfMemory(decl.name, nbytes, 0, 0)
        return alloc(self, decl, nbytes)

    monkeypatch.setattr(type(tier), "alloc", alloc_but)
    with ModelRunner(machine.model, tier, LIMITS) as runner:
        live = machine.watch(runner)

        def between(engine: Engine, tokens: int) -> None:
            if tokens >= 4 and not machine.taken:
                machine.look(live, engine)
                machine.leave(machine.bytes_of(FEWEST))
                machine.look(live, engine)

        if failures <= len(RETRY_SECONDS):
            found = run(machine.model, runner, FEW, between)
            assert_same(expected_of(machine.model, "dense", FEW), found)
        else:
            with pytest.raises(OutOfMemory, match="out of memory for state"):
                run(machine.model, runner, FEW, between)
    assert machine.waited == list(RETRY_SECONDS[:failures])
    machine.empty()
    assert tier.allocated_bytes == machine.before


@mainly
def test_nothing_changes_for_a_moment_or_over_and_over(tier, machine_of):
    """One look that finds little free changes nothing. Memory that is needed again soon after it
    was taken must be free for twice as long the next time."""
    machine, waits = machine_of("dense"), []
    with ModelRunner(machine.model, tier, LIMITS) as runner:
        live, engine = machine.watch(runner), Engine(runner, EngineOptions())
        machine.look(live, engine)
        machine.leave(machine.bytes_of(FEWEST))
        machine.seconds += 1
        live.look(engine)
        machine.taken = 0
        machine.look(live, engine)
        assert live.changes == 0
        for _ in range(3):
            machine.leave(machine.bytes_of(FEWEST))
            machine.look(live, engine)
            assert live.given_back
            machine.taken, free = 0, machine.seconds
            while live.given_back:
                machine.seconds += 1
                live.look(engine)
            waits.append(machine.seconds - free - 1)
    assert waits == [FREE_SECONDS, 2 * FREE_SECONDS, 4 * FREE_SECONDS]


@mainly
def test_a_file_that_was_changed_is_not_read_again(tier, copied, monkeypatch, caplog):
    """Its bytes may be others. The weights on the device are still right, so requests go on."""
    machine = Machine(open_model(copied), tier, monkeypatch)
    expected = expected_of(machine.model, "dense", FEW)
    with ModelRunner(machine.model, tier, LIMITS) as runner:
        live = machine.watch(runner)

        def between(engine: Engine, tokens: int) -> None:
            if tokens == 2:
                os.utime(copied)
            machine.leave(machine.bytes_of(FEWEST))
            machine.look(live, engine)

        found = run(machine.model, runner, FEW, between)
    assert_same(expected, found)
    assert live.changes == 0
    (said,) = [record.getMessage() for record in caplog.records]
    assert "was written to since it was opened" in said


@pytest.mark.parametrize("way", each("native", "opencl"), indirect=True, scope="module")
def test_a_tier_that_reads_a_file_in_place_stops_where_it_changed(tier, copied):
    """Before the next step."""
    model = open_model(copied)

    def write(engine: Engine, tokens: int) -> None:
        # Cutting it would end the process where a step in flight reads it.
        os.utime(copied)

    with (
        ModelRunner(model, tier, LIMITS) as runner,
        pytest.raises(ModelFileError, match="was written to since it was opened"),
    ):
        run(model, runner, FEW, write)
