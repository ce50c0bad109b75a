"""Runners of a tiny model, and a bound of the steps that give nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.types import TokenEvent
from harness.simulation import history
from reference.engine import Engine
from reference.runner import ModelRunner
from tests.engine import scored_prompts
from tests.engine.small_engine import LIMITS, TIERS
from tests.families_table import DENSE, HYBRIDS
from tests.named_tiers import quick_tier, runner_on

MOST_WITHOUT_TOKENS = 3000
"""Steps in a row, of whichever engines: who waits for a token after so many waits for ever."""


@pytest.fixture(autouse=True)
def steps_come_to_an_end(monkeypatch) -> None:
    """A test whose engine steps and steps, though it has work and nothing comes of it, fails."""
    step, without = Engine.step, 0

    def stepped(engine: Engine) -> list[TokenEvent]:
        nonlocal without
        without += 1
        assert without <= MOST_WITHOUT_TOKENS, "steps without a token"
        events = step(engine)
        without = 0 if events else without
        return events

    monkeypatch.setattr(Engine, "step", stepped)


@pytest.fixture
def finite_logits(monkeypatch) -> None:
    """No simulated request ends because its logits are not finite."""
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)


@pytest.fixture
def runner(tiny_model_path) -> Iterator[ModelRunner]:
    with runner_on(tiny_model_path, quick_tier, LIMITS) as runner:
        yield runner


@pytest.fixture
def dense(synthetic_model) -> Path:
    """A model whose pages are on disk."""
    return synthetic_model(**dict(DENSE["qwen3"]) | {"quant": "q8_0"})


@pytest.fixture
def hybrid(synthetic_model) -> Path:
    """One with states beside its pages."""
    return synthetic_model(**dict(HYBRIDS["qwen35"]) | {"quant": "q8_0"})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where the disk cache is."""
    return tmp_path / "cache"


@pytest.fixture(scope="module", params=TIERS)
def kept_runner(request, tiny_model_path) -> Iterator[ModelRunner]:
    """One runner for many engines: what an engine leaves behind must not matter."""
    with runner_on(tiny_model_path, TIERS[request.param], LIMITS) as runner:
        yield runner


@pytest.fixture(scope="module", params=scored_prompts.TIERS)
def scoring(request, tiny_model_path) -> Iterator[ModelRunner]:
    """A runner on each tier that can score tokens."""
    tier = scored_prompts.TIERS[request.param]
    with runner_on(tiny_model_path, tier, scored_prompts.LIMITS) as opened:
        yield opened


@pytest.fixture(scope="module")
def quick(tiny_model_path) -> Iterator[ModelRunner]:
    """The same on one tier."""
    with runner_on(tiny_model_path, quick_tier, scored_prompts.LIMITS) as opened:
        yield opened
