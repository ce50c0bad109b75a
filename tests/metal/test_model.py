"""A whole model on the simulated device, in many command buffers: every bit is the CPU tier's."""

from __future__ import annotations

import pytest

from accel.metal import memory
from accel.packets import work
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.conftest import SyntheticModel
from tests.metal.conftest import OpenTier
from tests.model_runs import FEW, assert_same, generate


def test_cut_steps_and_weights_read_where_they_are(
    open_metal: OpenTier, synthetic_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch a command buffer of its own; all weights that stay as stored are views."""
    monkeypatch.setattr(work, "BATCH_WORK", 1)
    monkeypatch.setattr(memory, "VIEW_BYTES", 1)
    model = open_model(synthetic_model(architecture="qwen3", quant="f16"))
    tier = open_metal()
    expected = generate(model, CpuTier(), FEW)
    assert_same(expected, generate(model, tier, FEW))
