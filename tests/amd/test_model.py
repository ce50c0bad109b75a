"""Whole models on the simulated GPU: every logit and token equals the CPU tier's."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.amd.sim.fake_kernel import FakeKernel
from contract.tier import Tier
from contract.types import Request, SamplingParams
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.amd.conftest import DRIVERS, OpenTier
from tests.few_rows import assert_definitions
from tests.opencl.test_model import REQUESTS, assert_same, generate

SHORT = (
    Request(1, tuple(range(80, 91)), 3, ignore_end=True),
    Request(2, (7,), 4, SamplingParams(temperature=1.3, top_p=0.8, seed=2**40), ignore_end=True),
)


@pytest.mark.parametrize(
    ("requests", "driver"),
    [
        (SHORT, "user queues"),
        pytest.param(REQUESTS, "amdkfd", marks=pytest.mark.soak),
        pytest.param(REQUESTS, "user queues", marks=pytest.mark.soak),
    ],
    ids=["short", "long", "long, user queues"],
)
def test_logits_and_tokens_are_the_cpu_tiers(
    open_amd: OpenTier, tiny_model_path: Path, requests: tuple[Request, ...], driver: str
) -> None:
    """Mixed prefill and decode, greedy and sampled."""
    model = open_model(tiny_model_path)
    expected = generate(model, CpuTier(), requests)
    assert_same(expected, generate(model, open_amd(tier=DRIVERS[driver]), requests))


def test_steps_of_few_rows_are_the_definitions(open_amd: OpenTier, tiny_model_path: Path) -> None:
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk."""
    assert_definitions(open_model(tiny_model_path), open_amd())


@pytest.mark.parametrize("driver", ["amdkfd", pytest.param("user queues", marks=pytest.mark.soak)])
def test_steps_in_steady_state_make_no_system_call(
    open_amd: OpenTier, kernel: FakeKernel, tiny_model_path: Path, driver: str
) -> None:
    """Decode without the host between the steps is ring writes and doorbells, once every form has
    been recorded; every launch saw what those before it wrote."""
    model = open_model(tiny_model_path)
    with CpuTier() as oracle:
        expected = tokens(model, oracle, None)
    assert tokens(model, open_amd(kernel, DRIVERS[driver]), kernel) == expected


def tokens(model: Model, tier: Tier, kernel: FakeKernel | None) -> list[list[tuple[int, int]]]:
    """(request, token) of each event, of the same requests twice; the second time ``kernel`` is
    not called."""
    found = []
    with ModelRunner(model, tier, Limits(2, 32, 8, step_tokens=16, step_rows=4)) as runner:
        for again in (False, True):
            calls = kernel.calls.total() if kernel is not None else 0
            engine = Engine(runner, steps_ahead=3)
            for request in SHORT:
                engine.submit(request)
            found.append([(event.request_id, event.token) for event in engine.run()])
            if kernel is not None and again:
                assert kernel.calls.total() == calls
    return found
