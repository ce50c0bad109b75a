"""The draft block or head of a model: right drafts by its formulas, and answers that it cannot
change."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import DeviceLost
from contract.records import RECENT_TOKEN
from contract.tier import Tier
from contract.types import FinishReason, Request, SamplingParams, TokenEvent
from reference.engine import Engine, EngineOptions, MaskProvider
from reference.engine.draft_block import DraftBlock
from reference.engine.drafter import ChainedDrafts
from reference.engine.drafters import drafter_limits, drafter_of, drafting_limits
from reference.engine.output_processor import OutputProcessor
from reference.engine.steps import Computed
from reference.limits import Limits
from reference.runner import ModelRunner, StepInput, StepOutput, Submission
from tests.engine.headed_models import block_model, headed_model, open_headed
from tests.engine.small_engine import EVERY_TIER as TIERS
from tests.engine.test_constrained_requests import few, two_residues
from tests.named_tiers import quick_tier, runner_on

ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")
LIMITS = Limits(
    slots=3, context=112, pages=7, step_tokens=48, step_rows=24, saved_states=6, masks=8,
    biases=4, top_log_probabilities=4, hidden_states=True,
)  # fmt: skip
DRAFTS = 5
FREQUENT_TOKENS = 250
"""Of 300 tokens. Prompts have no others, answers do: so some drafts are of all tokens."""
FAST = [
    *((name, tier) for name in ARCHITECTURES for tier in ("native", "cuda")),
    *(("qwen35", tier) for tier in ("quick", "late", "opencl")),
    *((f"qwen3 {head}", tier) for head in ("head", "dflash") for tier in ("opencl", "cuda")),
    *((f"qwen35 {head}", "native") for head in ("head", "dflash")),
]
"""Models and the tiers that take less than a second for a hundred steps of them."""
pytestmark = pytest.mark.usefixtures("unmeasured_steps")
Events = Mapping[int, list[TokenEvent]]
SyntheticModel = Callable[..., Path]
Runners = tuple[ModelRunner, ModelRunner, Events]


@contextmanager
def drafting(
    path: Path, tier: Tier, limits: Limits = LIMITS, frequent_tokens: int = FREQUENT_TOKENS
) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The runner of a model, and that of its draft block or head, which can draft tokens below
    ``frequent_tokens`` alone."""
    with ExitStack() as owned:
        model = open_headed(path, owned)
        whole = drafting_limits(limits, DRAFTS, model.head)
        sizes = drafter_limits(whole, model.head)
        runner = owned.enter_context(ModelRunner(model, tier, whole))
        graph = model.draft_graph(sizes)
        shared = runner.shared_buffers(graph)
        frequent = model.draft_graph(replace(sizes, frequent_tokens=frequent_tokens))
        block = ModelRunner(model, tier, sizes, graph=graph, shared=shared, frequent=frequent)
        yield runner, owned.enter_context(block)


RUNS = [(pair, 1, 20) for pair in FAST]
RUNS += [(pair, 0, None) for pair in FAST if pair[0] != "glm4moe"]
"""Without steps ahead the pages of glm4moe suffice, and nobody is preempted."""
RUNS += [(("qwen35", "vulkan"), 1, 20)]
HEADS = ("qwen3 head", "qwen3 dflash")


@pytest.fixture(scope="module", params=FAST, ids=" on ".join)
def runners(request, synthetic_model) -> Iterator[Runners]:
    """The runners of a model and of its draft block on a tier, and the answers without drafts."""
    name, tier_name = request.param
    path = drafting_model(synthetic_model, name)
    with TIERS[tier_name]() as tier, drafting(path, tier) as both:
        yield *both, answers_of_cpu(path)


def drafting_model(synthetic_model: SyntheticModel, name: str) -> Path:
    """A model that often samples what its block drafts, or its head."""
    architecture, _, head = name.partition(" ")
    fields = {"architecture": architecture, "quant": "q4_k_m"}
    if head:
        made = block_model if head == "dflash" else headed_model
        return made(synthetic_model, **fields, eagle_agreement=0.8)
    return synthetic_model(**fields, mtp_agreement=0.8)


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Prompts of which the first 20 tokens are alike."""
    return tuple((i * 7 if i < 20 else number * 31 + i * 5) % 250 for i in range(length))


REQUESTS = (
    Request(0, prompt(0, 30), 16, SamplingParams(), log_probabilities=3),
    Request(1, prompt(1, 61), 12, SamplingParams(temperature=0.8, top_k=40, seed=4)),
    Request(2, prompt(2, 23), 18, SamplingParams(repeat_penalty=1.3, repeat_last_n=12, seed=1)),
    Request(3, prompt(3, 70), 14, SamplingParams(), log_probabilities=1),
    Request(4, prompt(4, 9), 20, SamplingParams(), logit_bias=((7, 4.0), (9, -80.0))),
    Request(5, prompt(0, 30), 13, SamplingParams(temperature=1.5, seed=9), log_probabilities=4),
)
MASKS: dict[int, MaskProvider] = {4: few, 1: two_residues}


def run(
    engine: Engine, requests: Sequence[Request] = REQUESTS,
    masks: Mapping[int, MaskProvider] | None = None, cancels: Mapping[int, int] | None = None,
) -> Events:  # fmt: skip
    """The events of requests, of which two more join every other step. ``cancels``: a request and
    the tokens after which it is cancelled, as soon as a step gave it so many."""
    events: dict[int, list[TokenEvent]] = defaultdict(list)
    waiting, step = list(requests), 0
    while waiting or not engine.idle:
        for request in waiting[:2] if step % 2 == 0 else ():
            waiting.remove(request)
            engine.submit(request, allowed=(masks or {}).get(request.id))
        for event in engine.step():
            events[event.request_id].append(event)
        for number, tokens in (cancels or {}).items():
            if len(events[number]) >= tokens:
                engine.cancel(number)
        step += 1
    engine.memory.check([])
    return events


def engine_of(runner: ModelRunner, block: ModelRunner | None, **options: Any) -> Engine:
    built = EngineOptions(draft_tokens=DRAFTS, **options)
    return Engine(runner, built, drafter=None if block is None else drafter_of(block))


@cache
def answers_of_cpu(path: Path) -> Events:
    """The answers of the CPU tier without drafts."""
    limits = drafting_limits(LIMITS, DRAFTS, None)
    with runner_on(path, quick_tier, limits) as runner:
        answers = run(engine_of(runner, None, steps_ahead=0, prefix_cache=False), masks=MASKS)
    assert all(answers[one.id][-1].finish_reason is FinishReason.LENGTH for one in REQUESTS)
    return answers


@pytest.mark.parametrize(
    ("runners", "ahead", "chunk"),
    RUNS,
    ids=lambda value: " on ".join(value) if isinstance(value, tuple) else str(value),
    indirect=["runners"],
)
def test_no_draft_changes_an_answer(runners, ahead, chunk):
    """Greedy and sampled, with penalties, biases and masks, log-probabilities to the last bit; more
    sequences than slots, preempted for pages, with common prefixes, beside cancelled ones."""
    runner, block, expected = runners
    engine = engine_of(runner, block, steps_ahead=ahead, chunk_tokens=chunk)
    cancelled = [replace(REQUESTS[0], id=6), replace(REQUESTS[2], id=7)]
    events = dict(run(engine, [*cancelled, *REQUESTS], MASKS, {6: 2, 7: 7}))
    assert all(len(events.pop(one.id)) < one.max_tokens for one in cancelled)
    assert events == expected
    counts = engine.statistics
    assert counts.speculation.accepted > 10
    assert counts.speculation.drafted > counts.speculation.accepted
    # A dense model shares more pages, so that whole prompts wait for none.
    assert counts.preempted or (runner.model.config.recurrent is None and chunk is None)
    assert counts.prefix.tokens_hit


@pytest.mark.parametrize(
    ("runners", "ahead"),
    [
        *((("qwen35", tier), 0) for tier in ("quick", "native")),
        *((("qwen35", tier), 1) for tier in ("late", "opencl", "cuda")),
        *(((name, "native"), 1) for name in ("glm4moe", "qwen35 head", "qwen35 dflash")),
    ],
    ids=lambda value: " on ".join(value) if isinstance(value, tuple) else str(value),
    indirect=["runners"],
)
def test_a_cancel_at_any_step_changes_no_other(runners, ahead):
    """Every other request is cancelled, each with more tokens than the one before: in its prompt,
    after right drafts, and after wrong ones."""
    runner, block, expected = runners
    same = {n: n // 2 % 6 for n in range(24)}
    requests = [replace(REQUESTS[of], id=n, max_tokens=9) for n, of in same.items()]
    masks = {n: MASKS[of] for n, of in same.items() if of in MASKS}
    cancels = {n: n // 3 for n in range(1, 24, 2)}
    engine = engine_of(runner, block, steps_ahead=ahead)
    events = run(engine, requests, masks, cancels)
    for one in requests:
        given = [(event.token, event.log_probability, event.top) for event in events[one.id]]
        whole = [
            (event.token, event.log_probability, event.top) for event in expected[same[one.id]]
        ]
        assert given == whole[: len(given)]
        assert one.id in cancels or len(given) == 9
    lengths = {len(events[n]) for n in cancels}
    assert len(lengths) > 3
    assert engine.statistics.speculation.accepted > 10


@pytest.mark.parametrize("name", ["qwen35", *HEADS])
def test_a_wrong_acceptance_is_caught(synthetic_model, monkeypatch, name):
    """The control: records of every draft as right give other answers."""
    path = drafting_model(synthetic_model, name)
    take = OutputProcessor._take_drafted

    def accepting(
        self: OutputProcessor, part: Computed, tokens: list[int], output: StepOutput
    ) -> int:
        accepted = np.full_like(output.accepted, part.end_row - part.first_row - 1)
        return take(self, part, tokens, replace(output, accepted=accepted))

    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        expected = run(engine_of(runner, None), REQUESTS[:2])
        assert run(engine_of(runner, block), REQUESTS[:2]) == expected
        monkeypatch.setattr(OutputProcessor, "_take_drafted", accepting)
        assert run(engine_of(runner, block), REQUESTS[:2]) != expected


def test_the_host_never_reads_a_draft(synthetic_model, monkeypatch):
    """The device verifies what it has drafted itself, and accepts as much as of drafts that the
    host has read and sends."""
    order: list[str] = []
    submit, read = ModelRunner.submit, ChainedDrafts.read

    def submitted(self: ModelRunner, inputs: StepInput) -> Submission:
        order.append("verify" if RECENT_TOKEN in inputs.query["token"] else "step")
        return submit(self, inputs)

    def noted(self: ChainedDrafts) -> list[list[int]]:
        order.append("read")
        return read(self)

    monkeypatch.setattr(ModelRunner, "submit", submitted)
    monkeypatch.setattr(ChainedDrafts, "read", noted)
    path = drafting_model(synthetic_model, "qwen35")
    counts = []
    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        for reads in (False, True):
            if reads:
                monkeypatch.setattr(DraftBlock, "begin", DraftBlock.draft)
            order.clear()
            engine = engine_of(runner, block, prefix_cache=False)
            run(engine, REQUESTS[:1])
            counts.append(engine.statistics.speculation)
            assert set(order) == {"step", "read" if reads else "verify"}
    assert counts[0] == counts[1]
    assert counts[0].accepted > 5


@pytest.mark.parametrize("tier_name", ["quick", "native"])
def test_the_device_does_not_wait_for_consumers(synthetic_model, tier_name):
    """On a tier with a queue the next round is submitted before the tokens of one are handed out,
    but for those that end an answer."""
    path = drafting_model(synthetic_model, "qwen35")
    with TIERS[tier_name]() as tier, drafting(path, tier) as (runner, block):
        engine, found = engine_of(runner, block, prefix_cache=False), set()
        for one in REQUESTS[:2]:
            engine.submit(one)
        while not engine.idle:
            engine.advance()
            in_flight = len(engine._pipeline._in_flight)
            events = engine.take_events()
            if events:
                found.add((events[-1].finish_reason is not None, in_flight > 0))
    assert engine.statistics.speculation.accepted > 5
    assert found == {(False, tier.info.asynchronous), (True, False)}


def test_a_round_that_fails_keeps_the_tokens_before(synthetic_model, monkeypatch):
    """Whichever submission fails, of the block or of the model, no token is lost or comes twice."""
    path = drafting_model(synthetic_model, "qwen35")
    submit, left = ModelRunner.submit, [0]

    def failing(self: ModelRunner, inputs: StepInput) -> Submission:
        left[0] -= 1
        if left[0] == 0:
            raise DeviceLost("now")
        return submit(self, inputs)

    with TIERS["native"]() as tier, drafting(path, tier) as (runner, block):
        expected = run(engine_of(runner, None, prefix_cache=False), REQUESTS[:2])
        monkeypatch.setattr(ModelRunner, "submit", failing)
        for number in range(1, 40, 3):
            left[0] = number
            engine = engine_of(runner, block, prefix_cache=False)
            for one in REQUESTS[:2]:
                engine.submit(one)
            events: dict[int, list[TokenEvent]] = defaultdict(list)
            while not engine.idle:
                with suppress(DeviceLost):
                    for event in engine.step():
                        events[event.request_id].append(event)
            assert left[0] <= 0
            assert events == expected
