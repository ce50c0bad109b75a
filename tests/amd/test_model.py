"""Whole models on the simulated GPU: every logit and token equals the CPU tier's."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.amd.sim.fake_kernel import FakeKernel
from contract.tier import Tier
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.amd.conftest import DRIVERS, OpenTier
from tests.model_runs import FEW


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
            engine = Engine(runner, EngineOptions(steps_ahead=3))
            for request in FEW:
                engine.submit(request)
            found.append([(event.request_id, event.token) for event in engine.run()])
            if kernel is not None and again:
                assert kernel.calls.total() == calls
    return found
