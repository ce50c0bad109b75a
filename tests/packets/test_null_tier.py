"""The tier without arithmetic: an engine runs on it, and every token is the one it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.types import FinishReason
from reference.engine import Engine
from reference.model.open import open_model
from reference.runner import LOGITS, ModelRunner
from tests.engine.small_engine import LIMITS, events_of, request
from tests.null_tier import NullTier


@pytest.mark.parametrize("token", [0, 65])
def test_every_row_samples_the_token(tiny_model_path: Path, token: int) -> None:
    model = open_model(tiny_model_path)
    with model.file, NullTier(token) as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner)
        for number in range(8):
            engine.submit(request(number, length=20, max_tokens=6))
        events = events_of(engine)
        assert {n: [e.token for e in found] for n, found in events.items()} == {
            n: [token] * 6 for n in range(8)
        }
        assert all(found[-1].finish_reason is FinishReason.LENGTH for found in events.values())
        assert not runner.buffer(LOGITS).any()
