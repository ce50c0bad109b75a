"""Inputs of a round of drafts that are made of those of the round before."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.types import Request
from reference.runner import StepInput
from reference.sched.constraints import pack_mask
from reference.sched.drafts import DraftPolicy
from reference.sched.slots import SteadyRound
from tests.engine.test_constrained_requests import VOCAB
from tests.engine.test_draft_block import MASKS, REQUESTS, drafting, drafting_model, engine_of, run
from tests.named_tiers import quick_tier

pytestmark = pytest.mark.usefixtures("unmeasured_steps")


def most(generated: list[int]) -> np.ndarray:
    """Eight of nine tokens, others at each position: most drafts of a round are allowed."""
    return pack_mask((v for v in range(VOCAB) if (v + len(generated)) % 9), VOCAB)


def same(one: Any, other: Any) -> bool:
    """Whether two fields of inputs have the same type and bytes."""
    if not isinstance(one, np.ndarray):
        return bool(one == other)
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """Runs requests without and with drafts. Returns how many steps were asked for inputs made of
    those before, and how many had them; these are compared with new ones."""
    asked, had, of_round = 0, 0, SteadyRound.next

    def run_both(
        path: Path, requests: Sequence[Request], masks: dict[int, Any], counts: Sequence[int]
    ) -> tuple[int, int]:
        nonlocal asked, had
        asked, had, rounds = 0, 0, iter(range(1 << 20))

        def next_inputs(self: SteadyRound, admitted: Any, *step: Any) -> StepInput | None:
            nonlocal asked, had
            found = of_round(self, admitted, *step)
            if found is not None:
                anew = engine._slot_manager.table.step_input(*step)
                for field in fields(StepInput):
                    mine, theirs = (getattr(one, field.name) for one in (found, anew))
                    assert same(mine, theirs), field.name
            asked, had = asked + 1, had + (found is not None)
            return found

        monkeypatch.setattr(SteadyRound, "next", next_inputs)
        monkeypatch.setattr(
            DraftPolicy, "draft_count", lambda *_: counts[next(rounds) % len(counts)]
        )
        monkeypatch.setattr(DraftPolicy, "should_begin", lambda *_: True)
        with quick_tier() as tier, drafting(path, tier) as (runner, block):
            plain = run(engine_of(runner, None, steps_ahead=0), requests, masks)
            engine = engine_of(runner, block, steps_ahead=1)
            assert run(engine, requests, masks) == plain
            assert engine.statistics.speculation.accepted > 8
        return asked, had

    return run_both


@pytest.mark.parametrize("name", ["qwen35", "qwen3 head"])
@pytest.mark.parametrize("counts", [(3,), (2, 2, 2, 2, 2, 1)])
def test_they_are_those_made_anew(synthetic_model, compared, name, counts):
    """Of several sequences that come, end and are preempted, with masks, biases and penalties, with
    as many drafts each time or others."""
    asked, had = compared(drafting_model(synthetic_model, name), REQUESTS, MASKS, counts)
    assert 0 < had < asked


def test_masks_are_made_anew(synthetic_model, compared):
    """Each round has its own, also where it has as many drafts."""
    request = replace(REQUESTS[0], max_tokens=60)
    path = drafting_model(synthetic_model, "qwen35")
    assert compared(path, [request], {}, (1,))[1] > 8
    assert compared(path, [request], {0: most}, (1,))[1] == 0
