"""Other programs take memory of the device and free it: pages, then weights, leave the device and
come back while requests run, and no bit of an answer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.vulkan.tier import VulkanTier
from contract.dtypes import F16
from contract.tier import StreamsWeights, Tier
from contract.types import Request
from harness import memory
from harness.host.live_memory import FREE_SECONDS, SHORT_LOOKS, LiveMemory
from harness.residency import plan_residency
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.memory.planner import plan_memory
from reference.model.open import Model
from reference.runner import ModelRunner
from tests.conftest import SyntheticModel
from tests.model_runs import FEW, Outcome, assert_same
from tests.tiers.test_streaming import REQUESTS, model_of

LIMITS = Limits(3, 96, 18, F16, step_tokens=32, step_rows=32)
FEWEST = LIMITS.slot_pages
LEFT = 1 - 1 / memory.MARGIN_PARTS
"""The part of free memory that a model may take where no margin is too small."""
SMALL = 4096
"""Bytes that tests of allocation allow for rounding."""
ORACLES: dict[tuple[str, bool], Outcome] = {}


class Machine:
    """A model on a device with memory to spare, of which other programs take some; and a clock."""

    def __init__(self, model: Model, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.tier = model, tier
        assert isinstance(tier, StreamsWeights)
        tier.stream(model.graph(LIMITS), ())
        self.first = plan_residency(model, tier, [lambda _: LIMITS], LIMITS.context, 1 << 40)
        self.nbytes = 4 * self.first.plan.budgeted
        self.taken, self.seconds = 0, 0.0
        self.waited: list[float] = []
        self.before = tier.allocated_bytes
        monkeypatch.setattr(memory, "MARGIN_BYTES", 0)
        monkeypatch.setattr(type(tier), "available_bytes", property(lambda _: self.available))

    @property
    def available(self) -> int:
        """What is free on the device now."""
        return max(0, self.nbytes - (self.tier.allocated_bytes - self.before) - self.taken)

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
        for _ in range(SHORT_LOOKS):
            self.seconds += seconds
            live.look(engine)


@pytest.fixture
def machine_of(
    tier: Tier, synthetic_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Machine]]:
    made: list[Machine] = []

    def machine(name: str) -> Machine:
        made.append(Machine(model_of(synthetic_model, name), tier, monkeypatch))
        return made[-1]

    yield machine
    for one in made:
        if isinstance(tier, StreamsWeights):
            tier.stream(one.model.graph(LIMITS), ())


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


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, id=f"{way}-{name}")
        for way, name in (
            *(("opencl-banked", name) for name in ("dense", "hybrid", "mixture")),
            ("vulkan-own-memory", "dense"),
        )
    ],
    indirect=["way"],
    scope="module",
)
def test_memory_is_given_back_and_taken_again(
    tier: Tier, machine_of: Callable[[str], Machine], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer pages, then fewer weights, then all again, each after a part of the tokens."""
    machine = machine_of(name)
    requests = FEW if isinstance(tier, VulkanTier) else REQUESTS
    total = sum(request.max_tokens for request in requests)
    pages, weights = machine.bytes_of(FEWEST), machine.bytes_of(FEWEST, streams=True)
    left = pages, (pages + weights) // 2, 2 * machine.bytes_of(LIMITS.pages)
    done: list[tuple[int, bool, int]] = []

    with ModelRunner(machine.model, tier, LIMITS) as runner:
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
                assert held <= now.plan.allocated + SMALL, "the device has what was given back"
                assert live.given_back == machine.first.plan.budgeted - now.plan.budgeted
                assert (live.given_back > 0) == (len(done) < len(left))

        found = run(machine.model, runner, requests, between)
    assert done == [(FEWEST, False, 1), (FEWEST, True, 2), (LIMITS.pages, False, 3)]
    assert_same(expected_of(machine.model, name, requests), found)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[1].split()[0] for line in said] == ["gave", "gave", "took"]
