"""Runners of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.engine.small_engine import LIMITS, TIERS


@pytest.fixture
def runner(tiny_model_path: Path) -> Iterator[ModelRunner]:
    model = open_model(tiny_model_path)
    with model.file, CpuTier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        yield runner


@pytest.fixture(scope="module", params=TIERS)
def kept_runner(request: pytest.FixtureRequest, tiny_model_path: Path) -> Iterator[ModelRunner]:
    """One runner for many engines: what an engine leaves behind must not matter."""
    model = open_model(tiny_model_path)
    with (
        model.file,
        TIERS[request.param]() as tier,
        ModelRunner(model, tier, LIMITS) as runner,
    ):
        yield runner
