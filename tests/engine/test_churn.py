"""Who joins and leaves is data: once every form of a step is lowered, nothing is lowered again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from contract.tier import Tier
from contract.types import Request
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.named_tiers import is_emulated, named
from tests.null_tier import NullTier

STEPS = 240
WAVE = 190
"""The crowd grows and shrinks once; what lowers again does it with the first step of a form."""
EMULATED_STEPS = 34
"""Where a processor plays the device, a step takes twenty times as long. The crowd is quicker."""
LONG = pytest.mark.soak, pytest.mark.timeout(3600)
LIMITS = Limits(slots=16, context=64, pages=64, step_tokens=48, step_rows=16)
TIERS = named("native", "opencl", "vulkan", "cuda")
TIERS["null"] = NullTier
del TIERS["cpu"]


class Lowerings:
    """Counts what a tier lowers."""

    def __init__(self, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._lower = tier.lower
        monkeypatch.setattr(tier, "lower", self._counted)

    def _counted(self, *args: Any) -> Any:
        self.count += 1
        return self._lower(*args)


@pytest.fixture(params=TIERS)
def tier(request) -> Iterator[Tier]:
    with TIERS[request.param]() as tier:
        yield tier


@pytest.fixture
def runner(tier, synthetic_model) -> Iterator[ModelRunner]:
    """One narrow layer: what is computed does not matter here."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m", layers=1)
    model = open_model(path)
    with model.file, ModelRunner(model, tier, LIMITS) as runner:
        yield runner


def churn(runner: ModelRunner, steps: int, wave: int) -> tuple[set[int], int]:
    """Requests come, end and are cancelled at random, their number from little to little in
    ``wave`` steps: the numbers of sequences that were running, and how many steps read prompts
    while others decoded."""
    random = np.random.default_rng(7)
    engine = Engine(runner)
    shapes: list[tuple[int, int]] = []
    submit = runner.submit

    def observed(inputs: Any) -> Any:
        shapes.append((len(inputs.query), len(np.unique(inputs.query["slot"]))))
        return submit(inputs)

    runner.submit = observed  # type: ignore[method-assign]
    running: set[int] = set()
    number = 0
    while engine.statistics.steps < steps:
        # The crowd that is wanted grows and shrinks, so that all numbers of sequences occur.
        crowd = 1 + int(19.9 * abs(np.sin(np.pi * engine.statistics.steps / wave)))
        while len(running) < crowd:
            prompt = random.integers(0, 256, random.integers(1, 24))
            engine.submit(Request(number, tuple(prompt.tolist()), int(random.integers(1, 24))))
            running.add(number)
            number += 1
        while len(running) > crowd:
            leaving = int(random.choice(sorted(running)))
            engine.cancel(leaving)
            running.discard(leaving)
        running -= {e.request_id for e in engine.step() if e.finish_reason is not None}
    mixed = sum(tokens > sequences > 1 for tokens, sequences in shapes)
    return {sequences for _, sequences in shapes}, mixed


@pytest.mark.parametrize("most", [STEPS, pytest.param(1000, marks=LONG)])
def test_steps_of_churn_lower_nothing(runner, monkeypatch, most):
    runner.prepare()
    lowerings = Lowerings(runner.tier, monkeypatch)
    emulated = is_emulated(runner.tier)
    steps = EMULATED_STEPS if emulated else most
    sequences, mixed = churn(runner, steps, EMULATED_STEPS if emulated else WAVE)
    assert lowerings.count == 0
    assert {1, LIMITS.slots} <= sequences
    assert len(sequences) > 12
    assert mixed > steps // 10


@pytest.mark.parametrize("tier", [name for name in TIERS if name != "vulkan"], indirect=True)
def test_a_lowering_in_the_middle_of_churn_is_counted(runner, monkeypatch):
    """The control: what a port is bound to changes, so every form in use is lowered again."""
    runner.prepare()
    lowerings = Lowerings(runner.tier, monkeypatch)
    executable = runner._executable
    port = "output.ring"
    ring = executable.buffer(port)
    decl = runner.graph.buffers[port]
    other = runner.tier.alloc(decl, ring.nbytes)
    executable.bind(port, other)
    executable.bind(port, ring)
    churn(runner, 20, WAVE)
    runner.tier.free(other)
    assert 0 < lowerings.count <= len(executable.buckets)
