"""Whole models on the simulated GPU: every logit and token equals the CPU tier's."""

from __future__ import annotations

from pathlib import Path

from accel.amd.fake_kernel import FakeKernel
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.amd.conftest import OpenTier
from tests.opencl.test_model import CONTEXT, REQUESTS, compare

LIMITS = Limits(len(REQUESTS), CONTEXT, 24, step_tokens=64, step_rows=32)
SETTLED = 8
"""Steps after which every form has been lowered and run."""


def test_logits_and_tokens_are_the_cpu_tiers(open_amd: OpenTier, tiny_model_path: Path) -> None:
    """Mixed prefill and decode of four requests in three slots, greedy and sampled."""
    compare(open_model(tiny_model_path), open_amd())


def test_a_step_in_steady_state_makes_no_system_call(
    open_amd: OpenTier, kernel: FakeKernel, tiny_model_path: Path
) -> None:
    """Decode without the host between the steps is ring writes and doorbells; every launch saw
    what those before it wrote."""
    model = open_model(tiny_model_path)
    with CpuTier() as oracle:
        expected = tokens(model, oracle, 0)
    assert tokens(model, open_amd(kernel), 3, kernel) == expected


def tokens(
    model: Model, tier: object, ahead: int, kernel: FakeKernel | None = None
) -> dict[int, list[int]]:
    """Those of all requests; with ``kernel`` its calls must stop growing."""
    found: dict[int, list[int]] = {request.id: [] for request in REQUESTS}
    counts = []
    with ModelRunner(model, tier, LIMITS) as runner:  # type: ignore[arg-type]
        engine = Engine(runner, steps_ahead=ahead)
        for request in REQUESTS:
            engine.submit(request)
        for event in engine.run():
            found[event.request_id].append(event.token)
            if kernel is not None:
                counts.append(kernel.calls.total())
    assert kernel is None or counts[-1] == counts[SETTLED]
    return found
