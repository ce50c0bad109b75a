"""Drafts of several sequences that are computed before the host reads the round in front."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.arrays import Bytes
from contract.draft_shift import DraftShift, shift_inputs
from reference.engine.next_round import ALL
from reference.engine.sequence import Sequence
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.sched.drafts import DraftPolicy
from tests.engine.test_draft_block import (
    ARCHITECTURES,
    LIMITS,
    drafting,
    drafting_model,
    engine_of,
    run,
)
from tests.engine.test_drafts_ahead import ALIKE, Counted, set_steps
from tests.named_tiers import QuickTier, open_by_name

pytestmark = pytest.mark.usefixtures("unmeasured_steps")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "qwen3 head"])
def test_drafts_ahead_of_several_are_those_that_follow(
    synthetic_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str, early: bool
) -> None:
    """Each sequence with another number of drafts: as many are right as where each round waits."""

    def count_of(self: SpeculativeDecoder, sequence: Sequence) -> int:
        return min(1 + sequence.request.id, self._draft_limit_of(sequence))

    monkeypatch.setattr(SpeculativeDecoder, "_count_of", count_of)
    monkeypatch.setattr(DraftPolicy, "draft_count", lambda *_: 1)
    monkeypatch.setattr(DraftPolicy, "should_begin", lambda *_: True)
    path, made = drafting_model(synthetic_model, name), []
    limits = replace(LIMITS, pages=24)
    with open_by_name("native") as tier, drafting(path, tier, limits) as (runner, block):
        for steps in (0, ALL):
            set_steps(monkeypatch, steps, early and steps > 0)
            counted = Counted(monkeypatch)
            engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
            made.append((run(engine, ALIKE), engine.statistics.speculation))
            assert (counted.several > 8) == (steps > 0)
    assert made[0] == made[1]


class ShiftingTier(QuickTier):
    """A tier that changes inputs behind the steps in front, as a card does. ``shifted`` are the
    numbers of sequences of the steps whose inputs it changed."""

    def __init__(self) -> None:
        super().__init__("shifting")
        self.shifted: list[int] = []
        self._latest: Any = None

    def submit(self, *of_step: Any) -> Any:
        self._latest = super().submit(*of_step)
        return self._latest

    def prepare_shifts(self) -> None:
        pass

    def submit_shifted(self, batch: Any, inputs: Bytes, rows: Any, shift: DraftShift) -> Any:
        self.shifted.append(len(shift.sequences))
        self.wait(self._latest)
        changed = inputs.copy()
        shift_inputs(changed, self.map(shift.ring), shift.sequences)
        return self.submit(batch, changed, (), rows)


def test_a_tier_that_changes_inputs_has_all_drafts_ahead(
    synthetic_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked, of one sequence and of several; as many are right as on a tier that
    waits for each round, and they are what the tier made of its inputs."""
    monkeypatch.setattr(DraftPolicy, "draft_count", lambda policy, own, running, most, *_: 3)
    monkeypatch.setattr(DraftPolicy, "should_begin", lambda *_: True)
    path, made = drafting_model(synthetic_model, "qwen35"), []
    requests = [replace(one, max_tokens=30 + 30 * one.id) for one in ALIKE[:2]]
    shifting = ShiftingTier()
    for tier in (QuickTier("waiting"), shifting):
        with tier, drafting(path, tier, replace(LIMITS, pages=24)) as (runner, block):
            counted = Counted(monkeypatch)
            engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
            made.append((run(engine, requests), engine.statistics.speculation))
            assert (counted.used > 3) == (tier is shifting)
    assert made[0] == made[1]
    assert {1, 2} <= set(shifting.shifted)
