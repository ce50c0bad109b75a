"""Turns of an engine whose device takes assumed times: what a session that may draft loses where
nothing is right, and gains where much is. The clock runs by those times, so no machine changes a
figure."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from contract.execution import ExecutableGraph
from contract.ir.graph import Graph
from contract.shape_key import ShapeKey
from contract.tier import Tier
from contract.types import Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.engine.draft_block import DraftBlock
from reference.engine.drafter import Tokens
from reference.runner import ModelRunner, StepInput, StepOutput, Submission
from reference.sched.drafts import DraftPolicy
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.engine.test_draft_block import LIMITS, drafting, drafting_model

SLOTS, PROMPT, ANSWER = 4, 32, 96
SIZES = replace(LIMITS, slots=SLOTS, context=160, pages=40, step_tokens=132, step_rows=16)
STEP, SEQUENCE, ROW = 2.07e-3, 0.13e-3, 0.15e-3
"""Seconds of a plain step of one sequence, of each other, and of each row that verifies a draft: an
8B on an H200."""
PROMPT_TOKEN = 0.2e-3
"""Of each token of a prompt."""
DRAFT, DRAFT_TOKEN, BLOCK_SHARE = 0.2e-3, 8e-6, 0.05
"""Of a draft, of each further token that the block reads, and the part of a step that a prompt
takes longer if hidden states are kept; a plain step a fifth of that."""
HOST, LAUNCH = 60e-6, 40e-6
"""Of the host for each result and each submission."""


@dataclass
class Device:
    """Computes one submission after the other. ``now`` is the host's time."""

    block: ModelRunner
    now: float = 0.0
    free: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)

    def seconds(self, runner: ModelRunner, inputs: StepInput) -> float:
        tokens, rows = len(inputs.query), len(inputs.output_rows)
        if runner is self.block:
            return DRAFT + DRAFT_TOKEN * (tokens - 1)
        kept = 0.0 if inputs.plain else BLOCK_SHARE
        sequences = len(set(inputs.query["slot"].tolist()))
        plain = STEP + SEQUENCE * (sequences - 1)
        if tokens > rows:
            return (plain + PROMPT_TOKEN * (tokens - rows)) * (1 + kept)
        return plain * (1 + kept / 5) + ROW * (tokens - sequences)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        submit, collect = ModelRunner.submit, ModelRunner.collect

        def submitted(runner: ModelRunner, inputs: StepInput) -> Submission:
            self.now += LAUNCH
            self.free = max(self.now, self.free) + self.seconds(runner, inputs)
            submission = submit(runner, inputs)
            self.ends[id(submission.fence)] = self.free
            return submission

        def collected(runner: ModelRunner, submission: Submission) -> StepOutput:
            self.now = max(self.now, self.ends[id(submission.fence)]) + HOST
            return collect(runner, submission)

        patch.setattr(ModelRunner, "submit", submitted)
        patch.setattr(ModelRunner, "collect", collected)


class Wrong(DraftBlock):
    """A block of whose drafts some more are wrong: each stays with the chance ``kept``."""

    def __init__(self, runner: ModelRunner, kept: float) -> None:
        super().__init__(runner)
        self._kept, self._random = kept, Random(1)

    def begin(self, sequences: Any) -> list[Tokens]:
        return [self._some(draft) for draft in super().begin(sequences)]

    def _some(self, draft: Tokens) -> Tokens:
        wrong = [self._random.random() >= self._kept for _ in draft]
        # A token that is right by chance at most.
        return np.where(wrong, 255, draft).astype(np.int32)


def turns(
    engine: Engine, device: Device, together: int, apart: int, count: int
) -> tuple[list[Any], float]:
    """The answers of ``count`` turns of ``together`` requests, and their seconds. The next request
    comes once the first has had ``apart`` more tokens."""
    answers, began = [], device.now
    for turn in range(count):
        waiting = [
            Request(number, prompt_of(turn, number), ANSWER, SamplingParams(), ignore_end=True)
            for number in range(together)
        ]
        first = 0
        while waiting or not engine.idle:
            while waiting and first >= apart * (together - len(waiting)):
                engine.submit(waiting.pop(0))
            for event in engine.step():
                first += event.request_id == 0
                answers.append((turn, event.request_id, event.token))
    return sorted(answers), device.now - began


def prompt_of(turn: int, number: int) -> tuple[int, ...]:
    draw = Random(97 * turn + number)
    return tuple(draw.randrange(250) for _ in range(PROMPT))


@contextmanager
def device_and_runners(
    path: Path, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Device, ModelRunner, ModelRunner]]:
    with TIERS["late"]() as tier, drafting(path, tier, SIZES) as (runner, block):
        device = Device(block)
        device.patch(patch)
        yield device, runner, block


def speed(
    path: Path, kept: float, together: int, apart: int, count: int, patch: pytest.MonkeyPatch
) -> float:
    """The speed against an engine without drafts, whose answers are the same."""
    with device_and_runners(path, patch) as (device, runner, block):
        options = EngineOptions(draft_tokens=3, prefix_cache=False)
        plain = Engine(runner, options, clock=lambda: device.now)
        expected, usual = turns(plain, device, together, apart, count)
        drafted = Engine(runner, options, clock=lambda: device.now, drafter=Wrong(block, kept))
        answers, taken = turns(drafted, device, together, apart, count)
        assert answers == expected
        return usual / taken


@pytest.mark.parametrize(("together", "apart"), [(1, 0), (4, 0), (4, 16)])
def test_a_block_that_is_never_right_loses_at_most_a_fiftieth_and_a_few_steps(
    synthetic_model, monkeypatch, together, apart
):
    path = drafting_model(synthetic_model, "qwen35")
    count = 3
    tokens = count * ANSWER
    assert speed(path, 0.0, together, apart, count, monkeypatch) >= 0.98 - 8 / tokens


def test_a_block_that_reads_everything_loses_more(synthetic_model, monkeypatch):
    """The control: it follows every sequence, and nothing is drafted."""
    path = drafting_model(synthetic_model, "qwen35")
    monkeypatch.setattr(DraftPolicy, "draft_count", lambda *_: 0)
    found = []
    for follows in (False, True):
        monkeypatch.setattr(DraftPolicy, "should_follow", lambda *_, follows=follows: follows)
        monkeypatch.setattr(DraftPolicy, "given_up", lambda *_, follows=follows: not follows)
        with pytest.MonkeyPatch.context() as patch:
            found.append(speed(path, 0.0, 4, 16, 1, patch))
    assert found[0] > 0.999
    assert found[1] < 0.99


def test_plain_steps_have_a_row_for_each_slot(synthetic_model, monkeypatch):
    """With the rows of drafts, too, the last layer of a short prompt would be computed whole."""
    lowered: list[int] = []

    def recorded(tier: Tier, graph: Graph, buffers: Any, largest: ShapeKey, *rest: Any) -> Any:
        lowered.append(largest.rows)
        return ExecutableGraph(tier, graph, buffers, largest, *rest)

    monkeypatch.setattr("reference.runner.ExecutableGraph", recorded)
    path = drafting_model(synthetic_model, "qwen35")
    with TIERS["quick"]() as tier, drafting(path, tier) as (runner, _):
        limits = runner.limits
    assert limits.step_rows > limits.slots
    assert lowered[:2] == [limits.step_rows, limits.slots]
