"""Memory is what a plan predicts, views of the model file apart; and a whole model's bits."""

import pytest

from accel.metal import memory, tier
from accel.packets import work
from accel.packets.arenas import ArenaKind
from contract.dtypes import F16
from reference.cpu.tier import CpuTier
from reference.limits import whole_contexts
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.memory.test_allocation import FEW_STEPS, LLAMA, close, plan_on, step_of
from tests.model_runs import FEW, assert_same, generate


@pytest.mark.parametrize("quant", ["q4_k_m", "f16"])
@pytest.mark.parametrize("view_bytes", [1, 1 << 30], ids=["views", "copies"])
def test_plans(open_metal, synthetic_model, monkeypatch, quant, view_bytes):
    """Of a file's weights that stay as stored nothing is allocated where they are views."""
    for module in (memory, tier):
        monkeypatch.setattr(module, "VIEW_BYTES", view_bytes)
    model = open_model(synthetic_model(**{**LLAMA, "quant": quant}))
    limits = whole_contexts(4, 100, F16, 4, 4)
    opened = open_metal()
    plan, footprint = plan_on(model, opened, limits)
    assert bool(footprint.mapped) == (view_bytes == 1)
    with ModelRunner(model, opened, limits) as runner:
        runner.prepare()
        for tokens in FEW_STEPS:
            runner.step(step_of(tokens, limits))
        assert close(opened.allocated_bytes, plan.allocated)
        views = sum(
            arena.nbytes for arena in opened._memory._arenas if arena.kind is ArenaKind.VIEW
        )
        assert (views > 0) == (view_bytes == 1)


def test_cut_steps_and_weights_read_where_they_are(open_metal, synthetic_model, monkeypatch):
    """Every launch a command buffer of its own; all weights that stay as stored are views."""
    monkeypatch.setattr(work, "BATCH_WORK", 1)
    monkeypatch.setattr(memory, "VIEW_BYTES", 1)
    model = open_model(synthetic_model(architecture="qwen3", quant="f16"))
    tier = open_metal()
    expected = generate(model, CpuTier(), FEW)
    assert_same(expected, generate(model, tier, FEW))
