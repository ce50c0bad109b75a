"""Ratios measured within one run, printed and kept by pytest-benchmark, never judged.

Each of them compares two times taken here and now, so a slow or busy machine moves both.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from contract.ir.cost import graph_cost
from contract.shape_key import ShapeKey
from harness.bench.machine import stream_bandwidth
from harness.bench.steps import runner_on, step_of
from reference.cpu.threads import thread_count
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model
from reference.runner import ModelRunner, StepInput, StepOutput

PREFILL_TOKENS = 128
ROUNDS = 5


SMALL = {
    "llama": {"architecture": "llama", "quant": "q4_k_m"},
    "hybrid": {"architecture": "qwen35moe", "quant": "q4_k_m"},
}


@pytest.fixture(scope="module", params=SMALL)
def model(request, synthetic_model) -> Model:
    """Four layers, 512 wide: a dense decoder, and delta nets with experts."""
    return open_model(synthetic_model("small", **SMALL[request.param]))


@pytest.fixture(scope="module")
def runner(model) -> Iterator[ModelRunner]:
    with runner_on(model, CpuTier(), PREFILL_TOKENS) as opened:
        yield opened


def prefill(runner: ModelRunner, tokens: int) -> Iterator[StepInput]:
    """The same first tokens, again and again."""
    return itertools.repeat(step_of(runner, tokens))


def decode(runner: ModelRunner) -> Iterator[StepInput]:
    """Single tokens behind a prompt."""
    runner.step(step_of(runner, PREFILL_TOKENS))
    return (step_of(runner, 1, position) for position in itertools.count(PREFILL_TOKENS))


def measured(benchmark, runner: ModelRunner, inputs: Iterator[StepInput]) -> StepOutput:
    """Times of the first steps for pytest-benchmark, and the last output."""

    def following() -> tuple[tuple[StepInput], dict[str, object]]:
        return (next(inputs),), {}

    runner.step(next(inputs))
    return benchmark.pedantic(runner.step, setup=following, rounds=ROUNDS)


def seconds_of(runner: ModelRunner, inputs: Iterator[StepInput]) -> float:
    """The best of a few executions, the first one apart."""
    runner.step(next(inputs))
    best = float("inf")
    for step in itertools.islice(inputs, ROUNDS):
        started = time.perf_counter()
        runner.step(step)
        best = min(best, time.perf_counter() - started)
    return best


def keep(benchmark, name: str, ratio: float) -> None:
    benchmark.extra_info[name] = round(ratio, 4)
    print(f"\n{name.replace('_', ' ')}: {ratio:.4g}")


def test_decode_against_the_memory_bound(benchmark, runner):
    """How often a decode step's bytes could have been streamed in the time it took."""
    output = measured(benchmark, runner, decode(runner))
    assert np.isfinite(output.logits).all()
    moved = graph_cost(runner.graph, ShapeKey(1, 1), PREFILL_TOKENS).bytes_moved
    bound = moved / stream_bandwidth(thread_count(), 1 << 26)
    keep(benchmark, "decode_step_over_memory_bound", seconds_of(runner, decode(runner)) / bound)


def test_prefill_against_decode(benchmark, runner):
    """What a token of a prompt costs, in decode steps."""
    output = measured(benchmark, runner, prefill(runner, PREFILL_TOKENS))
    assert np.isfinite(output.logits).all()
    per_step = seconds_of(runner, decode(runner))
    per_token = seconds_of(runner, prefill(runner, PREFILL_TOKENS)) / PREFILL_TOKENS
    keep(benchmark, "decode_steps_per_prefill_token", per_token / per_step)


def test_fast_kernels_against_the_definitions(benchmark, runner, model):
    """How much faster the CPU tier is than the definitions it equals bit for bit."""
    fast = measured(benchmark, runner, prefill(runner, 4))
    with CpuTier(definitions_only=True) as tier, runner_on(model, tier, PREFILL_TOKENS) as defined:
        slow = defined.step(step_of(defined, 4))
        assert (fast.logits == slow.logits).all()
        seconds = [seconds_of(one, prefill(one, 4)) for one in (defined, runner)]
    keep(benchmark, "definitions_over_fast_kernels", seconds[0] / seconds[1])
