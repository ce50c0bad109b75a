"""The policy of drafts hears of every round of every sequence, and of its end."""

from typing import Any

import pytest

from contract.types import Request
from reference.engine import Engine, EngineOptions
from reference.sched.draft_history import DraftHistory
from reference.sched.drafts import DraftPolicy
from tests.engine.small_engine import ALL_TIERS, tokens_of
from tests.engine.test_speculation import LIMITS, Told
from tests.named_tiers import runner_on

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
REQUESTS = [Request(n, tuple(range(n, 9 + n)), 12 + 9 * n) for n in range(3)]


def test_a_round_is_noted_for_each_of_its_sequences_also_those_that_it_ends(
    synthetic_model, monkeypatch
):
    rounds: list[int] = []
    gained: list[int] = []
    note_round, note = DraftPolicy.note_round, DraftPolicy.note_gain

    def noted_round(
        policy: DraftPolicy, drafted: int, drafting: int, *rest: Any, **how: Any
    ) -> None:
        rounds.append(drafting)
        note_round(policy, drafted, drafting, *rest, **how)

    def noted(policy: DraftPolicy, own: DraftHistory, tokens: int, running: int) -> None:
        gained.append(tokens)
        note(policy, own, tokens, running)

    monkeypatch.setattr(DraftPolicy, "note_round", noted_round)
    monkeypatch.setattr(DraftPolicy, "note_gain", noted)
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    with runner_on(path, ALL_TIERS["quick"], LIMITS) as runner:
        options = EngineOptions(steps_ahead=0, prefix_cache=False)
        plain = tokens_of(Engine(runner, options), *REQUESTS)
        told = Told({one.prompt: plain[one.id] for one in REQUESTS}, wrong=1)
        engine = Engine(runner, options, drafter=told)
        assert tokens_of(engine, *REQUESTS) == plain
        decoder = engine._pipeline._speculative
        assert decoder is not None
        assert sum(rounds) == len(gained) > 9
        # Other tokens are those of prompts' steps and of plain steps: few, as most are right.
        assert len(rounds) < sum(gained) <= sum(len(answer) for answer in plain.values())
        engine.submit(Request(9, (1, 2, 3), 40))
        told._answers[1, 2, 3] = [5] * 40
        for _ in range(3):
            engine.step()
        engine.cancel(9)
        list(engine.run())
        decoder.draft()
        assert not decoder._histories
        assert not decoder._rounds
        assert not decoder._policy._running
