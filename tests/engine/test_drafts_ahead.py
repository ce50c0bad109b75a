"""The first drafts of a round that are computed before the host reads the round in front."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from contract.tier import Tier
from contract.types import Request, SamplingParams, TokenEvent
from reference import draft_shifts
from reference.engine import next_round, pipeline
from reference.engine.draft_block import DraftBlock
from reference.engine.drafter import DraftRequest, SpeculationStatistics
from reference.engine.next_round import ALL
from reference.engine.output_processor import OutputProcessor
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.runner import ModelRunner, StepInput, Submission
from reference.sched.drafts import DraftPolicy
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.engine.test_draft_block import (
    LIMITS,
    MASKS,
    REQUESTS,
    Events,
    Runners,
    answers_of_cpu,
    drafting,
    drafting_model,
    engine_of,
    run,
)
from tests.named_tiers import quick_tier

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
SyntheticModel = Callable[..., Path]
STEPS = (1, 2, 5)
WAYS = [*((steps, False) for steps in STEPS), (0, True), (2, True), (ALL, False), (ALL, True)]
"""Steps ahead of the result in front, and whether drafts are submitted before its tokens are
taken."""
GREEDY = [
    Request(n, tuple((n * 31 + i * 5) % 250 for i in range(9 + 13 * n)), 40, SamplingParams())
    for n in range(3)
]
Both = tuple[ModelRunner, ModelRunner]
CASES = [("qwen35", tier) for tier in ("late", "native", "opencl", "cuda")]
SEEDS = [*zip(CASES, range(4), strict=True)]
ALIKE = [replace(one, prompt=one.prompt[:9], max_tokens=60) for one in GREEDY]
"""Requests that begin in one step, so that each of their rounds is one step."""


@pytest.fixture(scope="module", params=[*CASES, ("qwen3 head", "native")], ids=" on ".join)
def runners(request, synthetic_model) -> Iterator[Runners]:
    """A model and its draft block on a tier, and the answers without drafts."""
    name, tier_name = request.param
    path = drafting_model(synthetic_model, name)
    with TIERS[tier_name]() as tier, drafting(path, tier) as both:
        yield *both, answers_of_cpu(path)


@pytest.fixture(scope="module", params=CASES, ids=" on ".join)
def roomy(request, synthetic_model) -> Iterator[Both]:
    """The same with pages for three sequences at a time."""
    name, tier_name = request.param
    path = drafting_model(synthetic_model, name)
    with TIERS[tier_name]() as tier, drafting(path, tier, replace(LIMITS, pages=24)) as both:
        yield both


class Counted:
    """How many rounds began with steps that were computed ahead, those of several sequences, and
    how many did not use them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used = self.several = self.unused = 0
        ask = DraftBlock._ahead_of

        def asked(block: DraftBlock, active: list[DraftRequest]) -> int:
            there = bool(block._ahead)
            found = ask(block, active)
            self.used += found > 0
            self.several += found > 0 and len(active) > 1
            self.unused += there and not found
            return found

        patch.setattr(DraftBlock, "_ahead_of", asked)


def set_steps(patch: pytest.MonkeyPatch, steps: int, early: bool = False) -> None:
    """Have every device compute so many steps ahead, and drafts before tokens are taken if
    ``early``."""

    def chosen(tier: object) -> int:
        return steps

    def chosen_early(info: object) -> bool:
        return early

    patch.setattr(next_round, "draft_steps_ahead", chosen)
    patch.setattr(next_round, "drafts_early", chosen_early)


def alone(
    runner: ModelRunner, block: ModelRunner | None, requests: list[Request]
) -> tuple[list[Events], SpeculationStatistics]:
    """The answers to requests one after the other."""
    engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
    answers = [run(engine, [one]) for one in requests]
    return answers, engine.statistics.speculation


@pytest.mark.parametrize(("steps", "early"), WAYS)
def test_drafts_ahead_are_those_that_follow(runners, monkeypatch, steps, early):
    """Rounds that use them and rounds that do not: the same drafts are right as where each round
    waits for the host. Their number is fixed: a round that begins early is of the number chosen one
    round before."""
    runner, block, _ = runners

    def fixed(policy: DraftPolicy, history: object, running: int, limit: int, *_: int) -> int:
        return min(3, limit)

    monkeypatch.setattr(DraftPolicy, "draft_count", fixed)
    expected, _ = alone(runner, None, GREEDY)
    set_steps(monkeypatch, 0)
    answers, waiting = alone(runner, block, GREEDY)
    assert answers == expected
    set_steps(monkeypatch, steps, early)
    counted = Counted(monkeypatch)
    assert alone(runner, block, GREEDY) == (expected, waiting)
    assert counted.used > 3
    # What follows the drafts that are accepted is used whatever these are.
    assert (counted.unused > 3) == (0 < steps < ALL)
    assert waiting.accepted > 10


@pytest.mark.parametrize(("steps", "early"), WAYS)
def test_no_draft_ahead_changes_an_answer(runners, monkeypatch, steps, early):
    """Greedy and sampled, with penalties, biases and masks, preempted, cancelled, with prefix hits
    and prompts in chunks: one sequence that is left is drafted for ahead."""
    runner, block, expected = runners
    set_steps(monkeypatch, steps, early)
    counted = Counted(monkeypatch)
    engine = engine_of(runner, block, steps_ahead=1, chunk_tokens=20)
    cancelled = [replace(REQUESTS[0], id=6), replace(REQUESTS[2], id=7)]
    events = dict(run(engine, [*cancelled, *REQUESTS], MASKS, {6: 2, 7: 7}))
    for one in cancelled:
        del events[one.id]
    assert events == expected
    assert engine.statistics.preempted
    assert engine.statistics.prefix.tokens_hit
    for one in REQUESTS:
        assert run(engine, [one], MASKS) == {one.id: expected[one.id]}
    assert counted.used + counted.unused > 3


@pytest.mark.parametrize(("steps", "early"), WAYS)
def test_cancels_and_joins_behind_drafts_ahead(runners, monkeypatch, steps, early):
    """A sequence with steps ahead is cancelled after each number of tokens, and another begins in
    its slot and its pages; or another joins it."""
    runner, block, _ = runners
    (first, second), _ = alone(runner, None, GREEDY[:2])
    set_steps(monkeypatch, steps, early)
    engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
    for tokens in (1, 2, 5, 9, 14):
        ended = replace(GREEDY[0], id=9)
        engine.submit(ended)
        given = 0
        while given < tokens:
            given += len(engine.step())
        engine.cancel(9)
        assert run(engine, [GREEDY[1]]) == second
        engine.submit(GREEDY[0])
        events = []
        while len(events) < tokens:
            events += engine.step()
        others = run(engine, [GREEDY[1]])
        assert others[1] == second[1]
        assert events + others.get(0, []) == first[0]


@pytest.mark.parametrize("roomy", CASES[:1], indirect=True, ids=" on ".join)
@pytest.mark.parametrize("pages", [pipeline.ROUND_PAGES, 1 << 20])
def test_a_round_is_verified_early_only_where_its_pages_are_free(roomy, monkeypatch, pages):
    runner, block = roomy
    monkeypatch.setattr(pipeline, "ROUND_PAGES", pages)
    set_steps(monkeypatch, 0, early=True)
    followed, follow = 0, SpeculativeDecoder.follow

    def counted(self: SpeculativeDecoder, *of_round: Any) -> None:
        nonlocal followed
        followed += 1
        follow(self, *of_round)

    monkeypatch.setattr(SpeculativeDecoder, "follow", counted)
    run(engine_of(runner, block, steps_ahead=1, prefix_cache=False), ALIKE[:2])
    assert (followed > 0) == (pages < 1 << 20)


@pytest.mark.parametrize("early", [False, True])
def test_rounds_of_several_sequences_begin_early(roomy, monkeypatch, early):
    """The same answers, also where one is cancelled, and nearly all of their rounds do."""
    runner, block = roomy
    monkeypatch.setattr(
        DraftPolicy, "draft_count", lambda policy, own, running, most, *_: min(3, most)
    )
    monkeypatch.setattr(DraftPolicy, "should_begin", lambda *_: True)
    requests = [ALIKE[1], replace(ALIKE[2], sampling=SamplingParams(temperature=0.8, seed=5))]
    expected = dict(item for one in alone(runner, None, requests)[0] for item in one.items())
    set_steps(monkeypatch, 2, early)
    counted = Counted(monkeypatch)
    engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
    assert run(engine, requests) == expected
    assert (counted.several > 8) == early
    for number, tokens in ((1, 5), (2, 9), (1, 14), (2, 23)):
        events = dict(run(engine, requests, cancels={number: tokens}))
        given = events.pop(number)
        assert tokens <= len(given) < len(expected[number])
        assert given == expected[number][: len(given)]
        assert events == {one: got for one, got in expected.items() if one != number}


@pytest.mark.parametrize(("runners", "seed"), SEEDS, indirect=["runners"])
def test_no_event_is_lost_or_doubled(runners, monkeypatch, seed):
    """Steps are interrupted wherever they are submitted, also those of a round that begins before
    the tokens in front of it are taken; consumers stop and go on; requests join and are
    cancelled."""
    requests = [replace(one, id=3 * n + one.id) for n in range(2) for one in GREEDY]
    assert interrupted_steps(runners[:2], monkeypatch, seed, requests, joining=0.04) > 3


@pytest.mark.parametrize(("roomy", "seed"), [(c, n + 8) for c, n in SEEDS], indirect=["roomy"])
def test_no_event_of_several_sequences_is_lost_or_doubled(roomy, monkeypatch, seed):
    """The same where they begin together, so that most rounds are those of several."""
    counted = Counted(monkeypatch)
    assert interrupted_steps(roomy, monkeypatch, seed, ALIKE, joining=1.0) > 1
    assert counted.several > 1


def interrupted_steps(
    both: Both, monkeypatch: pytest.MonkeyPatch, seed: int, requests: list[Request], joining: float
) -> int:
    """How many steps were interrupted while ``requests`` were answered, whose events are checked.
    Each joins with the chance ``joining`` before a step."""
    runner, block = both
    random, submit = Random(seed), ModelRunner.submit
    expected = dict(item for one in alone(runner, None, requests)[0] for item in one.items())
    set_steps(monkeypatch, random.choice((0, 1, 2, ALL)), early=True)
    engine = engine_of(runner, block, steps_ahead=1, prefix_cache=seed % 2 == 0, chunk_tokens=20)
    interrupted = 0

    def submitted(self: ModelRunner, inputs: StepInput) -> Submission:
        nonlocal interrupted
        if random.random() < 0.04:
            interrupted += 1
            raise KeyboardInterrupt
        return submit(self, inputs)

    monkeypatch.setattr(ModelRunner, "submit", submitted)
    cancelled, waiting = requests[seed % len(requests)].id, list(requests)
    events: dict[int, list[TokenEvent]] = {one.id: [] for one in requests}
    while waiting or not engine.idle:
        while waiting and (engine.idle or random.random() < joining):
            engine.submit(waiting.pop())
        for number in range(len(requests)):
            (engine.stall if random.random() < 0.03 else engine.unstall)(number)
        with suppress(KeyboardInterrupt):
            for event in engine.step():
                events[event.request_id].append(event)
        if len(events[cancelled]) >= 15:
            engine.cancel(cancelled)
    engine.memory.check([])
    for number, got in events.items():
        assert got == (expected[number] if number != cancelled else expected[number][: len(got)])
    assert engine.statistics.speculation.accepted > 10
    return interrupted


def test_the_device_does_not_wait_for_the_host(synthetic_model, monkeypatch):
    """Where all drafts are right, steps of the block follow the model's before it is read, and the
    rest, with the model's next step, before its tokens are taken."""
    order: list[str] = []
    submit, collect, take = ModelRunner.submit, ModelRunner.collect, OutputProcessor.take

    def submitted(self: ModelRunner, inputs: StepInput) -> Submission:
        order.append("d" if inputs.unread else "V")
        return submit(self, inputs)

    def collected(self: ModelRunner, submission: Submission):  # type: ignore[no-untyped-def]
        order.append("r")
        return collect(self, submission)

    def taken(self: OutputProcessor, *of_step: Any) -> bool:
        order.append("t")
        return take(self, *of_step)

    path = synthetic_model(architecture="qwen35", quant="q4_k_m", mtp_agreement=1.0)
    limits, vocab = replace(LIMITS, pages=24), 320
    monkeypatch.setattr(ModelRunner, "submit", submitted)
    monkeypatch.setattr(ModelRunner, "collect", collected)
    monkeypatch.setattr(OutputProcessor, "take", taken)
    with quick_tier() as tier, drafting(path, tier, LIMITS, vocab) as (runner, block):
        patterns = {
            (0, False): "VrtdddV",
            (2, False): "VddrtdV",
            (0, True): "VrdddVt",
            (2, True): "VddrdVddt",
            (ALL, False): "VdddrtV",
            (ALL, True): "VdddrVdddt",
        }
        for way, pattern in patterns.items():
            set_steps(monkeypatch, *way)
            order.clear()
            alone(runner, block, GREEDY[:1])
            assert pattern in "".join(order)
    # Of several sequences nothing is drafted before the result is read.
    with quick_tier() as tier, drafting(path, tier, limits, vocab) as (runner, block):
        for early, pattern in ((False, "VrtdddV"), (True, "VrdddVt")):
            set_steps(monkeypatch, 2, early)
            order.clear()
            engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
            run(engine, ALIKE[:2])
            assert pattern in "".join(order)
    # While somebody waits for the slot, who runs next is decided with all tokens taken.
    with quick_tier() as tier, drafting(path, tier, replace(LIMITS, slots=1)) as (runner, block):
        engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
        for one in GREEDY[:2]:
            engine.submit(one)
        order.clear()
        while not any(event.finish_reason for event in engine.step()):
            pass
        assert "VddrdtV" in "".join(order)
        assert "Vddt" not in "".join(order)


def test_nothing_is_kept_of_a_cancelled_sequence(synthetic_model, monkeypatch):
    """A step of two sequences is read after the first of them was cancelled."""
    monkeypatch.setattr(DraftPolicy, "should_begin", lambda *_: False)
    path = drafting_model(synthetic_model, "qwen35")
    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        set_steps(monkeypatch, 2, early=True)
        engine = engine_of(runner, block, steps_ahead=1, prefix_cache=False)
        for one in GREEDY[:2]:
            engine.submit(one)
        for _ in range(8):
            engine.step()
        engine.cancel(GREEDY[0].id)
        assert run(engine, [])
        assert engine._speculative is not None
        assert not engine._speculative._histories


@pytest.mark.parametrize("steps", [2, ALL])
def test_a_penalty_sees_no_draft_ahead(runners, monkeypatch, steps):
    """Nothing is noted for a sequence whose penalties look at recent tokens."""
    runner, block, expected = runners
    set_steps(monkeypatch, steps)
    counted = Counted(monkeypatch)
    answers, _ = alone(runner, block, [REQUESTS[2]])
    assert answers == [{2: expected[2]}]
    assert counted.used == counted.unused == 0


def test_stale_drafts_are_caught(synthetic_model, monkeypatch):
    """The control: steps ahead that are used though a draft was wrong make fewer drafts right."""
    path = drafting_model(synthetic_model, "qwen35")
    set_steps(monkeypatch, 2)
    tier: Tier
    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        expected, sound = alone(runner, block, GREEDY)

        def stale(self: DraftBlock, active: list[DraftRequest]) -> int:
            ahead, self._ahead = self._ahead, {}
            return min([one.limit for one in (*ahead.values(), *active[:1])]) if ahead else 0

        monkeypatch.setattr(DraftBlock, "_ahead_of", stale)
        answers, counts = alone(runner, block, GREEDY)
        assert answers == expected
        assert counts != sound


def test_drafts_behind_others_are_caught(synthetic_model, monkeypatch):
    """The control: steps that follow all drafts, whatever is accepted, make fewer drafts right."""
    path = drafting_model(synthetic_model, "qwen35")
    set_steps(monkeypatch, ALL)
    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        expected, sound = alone(runner, block, GREEDY)
        monkeypatch.setattr(draft_shifts, "shift_inputs", lambda *_: None)
        answers, counts = alone(runner, block, GREEDY)
        assert answers == expected
        assert counts.accepted < sound.accepted
