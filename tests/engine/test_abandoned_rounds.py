"""Rounds of drafts that are abandoned while they begin behind a step that was read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from reference.engine.pipeline import Pipeline
from reference.runner import ModelRunner
from reference.sched.drafts import DraftPolicy
from tests.engine.test_draft_block import LIMITS, drafting, drafting_model, engine_of
from tests.engine.test_drafts_ahead import ALIKE, set_steps
from tests.named_tiers import quick_tier

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
LEAVES, STAYS = ALIKE[:2]
Both = tuple[ModelRunner, ModelRunner]


@pytest.fixture(scope="module")
def runners(synthetic_model) -> Iterator[Both]:
    """A model and its draft block."""
    path = drafting_model(synthetic_model, "qwen35")
    with quick_tier() as tier, drafting(path, tier, replace(LIMITS, pages=24)) as both:
        yield both


def test_who_stays_and_is_stalled_loses_no_token(runners, monkeypatch):
    """One of two that draft stalls behind a step of both, and the other leaves while the next round
    is submitted: the tokens of the step come once."""

    def fixed(policy: DraftPolicy, history: object, running: int, limit: int, *_: int) -> int:
        return min(3, limit)

    monkeypatch.setattr(DraftPolicy, "draft_count", fixed)
    set_steps(monkeypatch, 0, early=True)
    engine = engine_of(*runners, steps_ahead=1, prefix_cache=False)
    engine.submit(STAYS)
    expected = [event.token for event in engine.run()]
    for one in (LEAVES, STAYS):
        engine.submit(one)
    reading, submit = Pipeline.read, ModelRunner.submit
    leaves = within = False

    def read(pipeline: Pipeline) -> Any:
        nonlocal within
        within = True
        try:
            return reading(pipeline)
        finally:
            within = False

    def submitted(runner: ModelRunner, inputs: Any) -> Any:
        if runner is runners[0] and within and leaves:
            engine.will_cancel([LEAVES.id])
        return submit(runner, inputs)

    monkeypatch.setattr(Pipeline, "read", read)
    monkeypatch.setattr(ModelRunner, "submit", submitted)
    tokens: list[int] = []
    for leaves in [False] * 8 + [True]:
        if leaves:
            engine.stall(STAYS.id, patient=True)
        tokens += [event.token for event in engine.step() if event.request_id == STAYS.id]
    engine.unstall(STAYS.id)
    engine.cancel(LEAVES.id)
    assert tokens + [event.token for event in engine.run()] == expected
