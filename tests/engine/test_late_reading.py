"""A draft block that begins to follow a sequence in the middle of its answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from contract.types import Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import DraftRequest, Tokens
from reference.sched import drafts
from reference.sched.drafts import DraftPolicy
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.engine.test_draft_block import (
    DRAFTS,
    LIMITS,
    MASKS,
    REQUESTS,
    answers_of_cpu,
    drafting,
    drafting_model,
    engine_of,
    prompt,
    run,
)
from tests.engine.test_draft_formulas import TOLERANCE, Observed, difference
from tests.peer.float64_model import float64_model

pytestmark = pytest.mark.usefixtures("unmeasured_steps")


@pytest.fixture(autouse=True)
def _no_prompt_is_read(monkeypatch) -> None:
    monkeypatch.setattr(DraftPolicy, "should_follow", lambda self, *asked: False)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("name", "tier"), [("qwen35", "native"), ("qwen3 head", "opencl")])
def test_no_draft_changes_an_answer(synthetic_model, name, tier, ahead):
    path = drafting_model(synthetic_model, name)
    with TIERS[tier]() as opened, drafting(path, opened) as (runner, block):
        engine = engine_of(runner, block, steps_ahead=ahead)
        assert run(engine, REQUESTS, MASKS) == answers_of_cpu(path)
    assert engine.statistics.speculation.accepted > 10


class Late(Observed):
    """Notes where the hidden states of each sequence begin, and stops following now and then."""

    def begin(self, sequences: Sequence[DraftRequest]) -> list[Tokens]:
        begins = [self._followed[one.key].begin for one in sequences if one.limit]
        before = len(self.drafted)
        found = super().begin(sequences)
        for begin, (tokens, _) in zip(begins, self.drafted[before:], strict=True):
            self.begins.append((len(tokens), begin))
        return found

    begins: list[tuple[int, int]]


@pytest.mark.parametrize(("length", "ahead"), [(9, 0), (95, 1)])
def test_drafts_follow_the_formulas_without_the_states_before(synthetic_model, length, ahead):
    """The hidden states of the prompt and of the steps before are zeros."""
    path = synthetic_model(architecture="qwen3next", quant="f32", nextn_layers=1, seed=3)
    limits = replace(LIMITS, context=160, pages=40, step_tokens=112)
    truth = float64_model(path)
    with TIERS["quick"]() as tier, drafting(path, tier, limits) as (runner, block):
        drafter = Late(block, 1)
        drafter.begins = []
        options = EngineOptions(draft_tokens=DRAFTS, prefix_cache=False, steps_ahead=ahead)
        run(
            Engine(runner, options, drafter=drafter),
            [Request(0, prompt(0, length), 30, SamplingParams())],
        )
    assert len(drafter.drafted) > 3
    for (tokens, row), (_, begin) in zip(drafter.drafted, drafter.begins, strict=True):
        assert length <= begin <= len(tokens) - 2
        expected = truth.draft_logits(tokens, frozenset(range(begin + 1)))[-1]
        assert difference(row, expected) < TOLERANCE["qwen3next"]


def test_a_sequence_that_is_left_is_followed_again(synthetic_model, monkeypatch):
    """The policy gives a sequence up after two rounds, and tries again two tokens later."""
    path = drafting_model(synthetic_model, "qwen35")
    counts: list[int] = []

    def seldom(self: DraftPolicy, own: Any, running: int, limit: int, unread: int = 0) -> int:
        counts.append(unread)
        return limit if own.rounds < 2 else 0

    monkeypatch.setattr(DraftPolicy, "draft_count", seldom)
    monkeypatch.setattr(DraftPolicy, "given_up", lambda self, own: True)
    monkeypatch.setattr(drafts, "TRIAL_INTERVAL", 2)
    with TIERS["quick"]() as tier, drafting(path, tier) as (runner, block):
        for ahead in (0, 1):
            engine = engine_of(runner, block, steps_ahead=ahead, prefix_cache=False)
            assert run(engine, REQUESTS, MASKS) == answers_of_cpu(path)
            assert engine.statistics.speculation.pauses > 3
    assert max(counts) > 30
