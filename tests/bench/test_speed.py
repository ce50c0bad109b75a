"""Ratios measured within one run, printed and kept by pytest-benchmark, never judged.

Each of them compares two times taken here and now, so a slow or busy machine moves both.
"""

from __future__ import annotations

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
from reference.runner import ModelRunner, StepInput

PREFILL_TOKENS = 128
ROUNDS = 5


@pytest.fixture(scope="module")
def model(synthetic_model) -> Model:
    """A llama of four layers, 512 wide, in Q4_K_M."""
    return open_model(synthetic_model("small", architecture="llama", quant="q4_k_m"))


@pytest.fixture(scope="module")
def runner(model) -> Iterator[ModelRunner]:
    with runner_on(model, CpuTier(), PREFILL_TOKENS) as opened:
        yield opened


def seconds_of(runner: ModelRunner, inputs: StepInput) -> float:
    """The best of a few executions, the first one apart."""
    runner.step(inputs)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        runner.step(inputs)
        best = min(best, time.perf_counter() - started)
    return best


def keep(benchmark, name: str, ratio: float) -> None:
    benchmark.extra_info[name] = round(ratio, 4)
    print(f"\n{name.replace('_', ' ')}: {ratio:.4g}")


def test_decode_against_the_memory_bound(benchmark, runner):
    """How often a decode step's bytes could have been streamed in the time it took."""
    inputs = step_of(runner, 1, PREFILL_TOKENS)
    output = benchmark.pedantic(runner.step, (inputs,), rounds=ROUNDS, warmup_rounds=1)
    assert np.isfinite(output.logits).all()
    moved = graph_cost(runner.graph, ShapeKey(1, 1), PREFILL_TOKENS).bytes_moved
    bound = moved / stream_bandwidth(thread_count(), 1 << 26)
    keep(benchmark, "decode_step_over_memory_bound", seconds_of(runner, inputs) / bound)


def test_prefill_against_decode(benchmark, runner):
    """What a token of a prompt costs, in decode steps."""
    inputs = step_of(runner, PREFILL_TOKENS)
    output = benchmark.pedantic(runner.step, (inputs,), rounds=ROUNDS, warmup_rounds=1)
    assert np.isfinite(output.logits).all()
    decode = seconds_of(runner, step_of(runner, 1, PREFILL_TOKENS))
    per_token = seconds_of(runner, inputs) / PREFILL_TOKENS
    keep(benchmark, "decode_steps_per_prefill_token", per_token / decode)


def test_fast_kernels_against_the_definitions(benchmark, runner, model):
    """How much faster the CPU tier is than the definitions it equals bit for bit."""
    inputs = step_of(runner, 4)
    fast = benchmark.pedantic(runner.step, (inputs,), rounds=ROUNDS, warmup_rounds=1)
    with CpuTier(definitions_only=True) as tier, runner_on(model, tier, PREFILL_TOKENS) as defined:
        slow = defined.step(inputs)
        assert (fast.logits == slow.logits).all()
        ratio = seconds_of(defined, inputs) / seconds_of(runner, inputs)
    keep(benchmark, "definitions_over_fast_kernels", ratio)
