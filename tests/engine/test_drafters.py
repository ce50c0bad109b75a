"""A drafter hears of every slot that is lost, however it is lost."""

from typing import Any

import numpy as np
import pytest

from contract.errors import DeviceLost
from contract.types import QosClass, Request, Tenant
from harness.simulation import history
from harness.simulation.history import solo_run
from reference.engine import Engine
from reference.engine.draft_model import DraftModel, draft_limits
from reference.engine.drafter import DraftRequest, PromptLookup, Tokens
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.rates import WINDOW_SECONDS
from reference.sched.tenants import Tenants
from tests.engine.adversaries import engine_of
from tests.engine.small_engine import LIMITS, SLOTS, request, tokens_of
from tests.named_tiers import quick_tier

CALM = Tenant(1, "calm", qos=QosClass.BATCH, max_slots=9)
HURRIED = Tenant(2, "hurried", qos=QosClass.INTERACTIVE, max_slots=9)


def followed(engine: Engine) -> set[int]:
    """The sequences that the engine and its drafter keep something of."""
    speculative = engine._speculative
    assert speculative is not None
    assert isinstance(speculative._drafter, PromptLookup)
    return {*speculative._histories, *speculative._drafter._occurrences}


def running(engine: Engine) -> set[int]:
    return {p.order for p in engine._slot_manager.running.values()}


@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_is_kept_of_who_lost_its_slot(cancelled, monkeypatch):
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)
    engine, _ = engine_of(CALM, HURRIED, drafter=PromptLookup())
    calm: list[int] = []
    for number in range(60):
        tenant = 2 if number % 3 == 2 else 1
        prompt = tuple(i % 5 for i in range(number % 40 + 9))
        tokens = 3 if tenant == 2 else 60
        engine.submit(Request(number, prompt, tokens, tenant=tenant, ignore_end=True))
        for _ in range(6):
            engine.step()
            assert followed(engine) <= running(engine)
        if tenant == 1:
            calm.append(number)
        if cancelled and len(calm) > 3:
            engine.cancel(calm.pop(0))
            assert followed(engine) <= running(engine)
    assert engine.statistics.preempted > (0 if cancelled else 9)
    list(engine.run())
    assert not followed(engine)


class Knows:
    """Drafts the right tokens of every sequence."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = np.array(answer, np.int32)

    def draft(self, sequences: list[DraftRequest]) -> list[Tokens]:
        return [self.answer[len(each.tokens) :][: each.limit] for each in sequences]

    def ready(self, key: int, tokens: Tokens) -> bool:
        return True

    def forget(self, key: int) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_drafted_tokens_count_where_handing_over_fails(fails, monkeypatch):
    """The rate of a tenant has every token that it got, whatever fails at the last of them."""
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)
    asked = Request(1, tuple(range(20)), 31, tenant=1, ignore_end=True)
    answer = [event.token for event in solo_run(asked, 512).events]
    engine, _ = engine_of(CALM, drafter=Knows([*asked.prompt, *answer]), draft_tokens=3)
    processor = engine._output_processor
    finish = processor._finish

    def failing(*how: Any) -> None:
        finish(*how)
        if fails:
            raise DeviceLost("a copy failed")

    monkeypatch.setattr(processor, "_finish", failing)
    engine.submit(asked)
    tokens, failures = [], 0
    while not engine.idle or engine.has_events:
        try:
            tokens += [event.token for event in engine.step()]
        except DeviceLost:
            failures += 1
    assert tokens == answer
    assert failures == int(fails)
    assert engine.statistics.speculation.accepted > 9
    counted = engine.tenants.usage(1).decode_tokens_per_s * WINDOW_SECONDS
    assert counted == len(answer)


def test_a_draft_model_beside_preemption(tiny_model_path):
    """Every request gets the tokens it gets alone, and the draft model's slots are free again."""
    model = open_model(tiny_model_path)
    with (
        model.file,
        quick_tier() as tier,
        ModelRunner(model, tier, LIMITS) as runner,
        ModelRunner(model, tier, draft_limits(LIMITS)) as beside,
    ):
        requests = [request(n, length=12 + n, max_tokens=50, tenant=0) for n in range(9)]
        expected = tokens_of(Engine(runner), *requests)
        drafter = DraftModel(beside, model)
        engine = Engine(
            runner, drafter=drafter, tenants=Tenants([CALM, HURRIED], clock=lambda: 0.0)
        )
        tokens: dict[int, list[int]] = {}

        def step() -> None:
            for event in engine.step():
                tokens.setdefault(event.request_id, []).append(event.token)

        for n in range(9):
            tenant = 2 if n >= SLOTS else 1
            engine.submit(request(n, length=12 + n, max_tokens=50, tenant=tenant))
            step()
            step()
        while not engine.idle:
            step()
        assert engine.statistics.preempted > 0
        assert tokens == expected
        assert not drafter._followed
