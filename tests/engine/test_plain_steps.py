"""A step without drafts that no draft block reads has the ops of a session that never drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.ir.graph import Graph
from contract.ir.unread_outputs import ADAPTER_IDS
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier
from contract.types import Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.engine.draft_block import DraftBlock
from reference.engine.drafter import Tokens
from reference.hidden_rows import HIDDEN_TABLE
from reference.limits import with_drafts
from reference.memory.planner import plan_memory
from reference.model.open import Model, open_model
from reference.runner import ModelRunner, StepInput, Submission
from reference.sched.drafts import DraftPolicy
from reference.warm_up import warm_up
from tests.adapters import write_adapter
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.engine.test_draft_block import LIMITS, drafting, drafting_model, engine_of, run
from tests.engine.test_speculation import Told
from tests.named_tiers import runner_on

DRAFTED = with_drafts(LIMITS, 5)
REQUESTS = [
    Request(n, tuple((n * 31 + i * 5) % 250 for i in range(9 + 13 * n)), 30, SamplingParams())
    for n in range(4)
]
pytestmark = pytest.mark.usefixtures("unmeasured_steps")


class Steps:
    """The graphs that a runner's tier lowers, and of each of its steps the graph and whether a
    sequence has several rows."""

    def __init__(self, runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
        self.lowered: list[Graph] = []
        self.graphs: list[Graph] = []
        self.drafts: list[bool] = []
        batches: dict[int, tuple[Any, Graph]] = {}
        tier: Tier = runner.tier
        lower, begin, submit = tier.lower, tier.submit, runner.submit

        def lowering(graph: Graph, *more: Any) -> Any:
            batch = lower(graph, *more)
            self.lowered.append(graph)
            batches[id(batch)] = batch, graph
            return batch

        def beginning(batch: Any, *more: Any) -> Any:
            if id(batch) in batches:
                self.latest = batches[id(batch)][1]
            return begin(batch, *more)

        def submitting(inputs: StepInput) -> Submission:
            submission = submit(inputs)
            slots = inputs.sampling["slot"].tolist()
            self.drafts.append(len(set(slots)) < len(slots))
            self.graphs.append(self.latest)
            return submission

        patch.setattr(tier, "lower", lowering)
        patch.setattr(tier, "submit", beginning)
        patch.setattr(runner, "submit", submitting)

    def clear(self) -> None:
        """Forget all of them."""
        for noted in (self.lowered, self.graphs, self.drafts):
            noted.clear()

    @property
    def verified(self) -> list[bool]:
        """Whether each step counts right drafts."""
        return [Opcode.VERIFY_K in graph.opcodes for graph in self.graphs]

    @property
    def kept(self) -> list[bool]:
        """Whether each step keeps its hidden states."""
        return [HIDDEN_TABLE in graph.buffers for graph in self.graphs]


class Seldom(Told):
    """Guesses where the number of known tokens is a multiple of 8."""

    def ready(self, key: int, tokens: Tokens) -> bool:
        return len(tokens) % 8 == 0


@pytest.mark.parametrize(
    ("tier", "ahead"),
    [*((tier, ahead) for tier in TIERS if tier != "vulkan" for ahead in (0, 1, 3)), ("vulkan", 1)],
)
def test_steps_without_drafts_verify_none(synthetic_model, monkeypatch, tier, ahead):
    """Steps with drafts follow steps submitted ahead and go before them; the answers are those
    without drafts, and nothing is lowered again."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    with runner_on(path, TIERS[tier], DRAFTED) as runner:
        steps = Steps(runner, monkeypatch)
        expected = run(engine_of(runner, None, steps_ahead=ahead, prefix_cache=False), REQUESTS)
        assert steps.graphs
        assert set(steps.verified) == {False}
        told = {r.prompt: [event.token for event in expected[r.id]] for r in REQUESTS}
        for again in (False, True):
            steps.clear()
            options = EngineOptions(steps_ahead=ahead, prefix_cache=False, draft_tokens=5)
            assert run(Engine(runner, options, drafter=Seldom(told, 1)), REQUESTS) == expected
            assert steps.verified == steps.drafts
            assert {True, False} == set(steps.drafts)
            assert bool(steps.lowered) != again


def test_a_step_without_drafts_is_lowered_for_a_row_of_each_slot(synthetic_model, monkeypatch):
    """As in a session that never drafts, so the last layer of a prompt computes as few rows; a step
    that reads more rows is computed like one with drafts."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    with runner_on(path, TIERS["quick"], DRAFTED) as runner:
        buckets: list[ShapeKey] = []
        lower = runner.tier.lower
        monkeypatch.setattr(
            runner.tier, "lower",
            lambda graph, buffers, bucket, *more: (
                buckets.append(bucket), lower(graph, buffers, bucket, *more)
            )[1],
        )  # fmt: skip
        run(engine_of(runner, None, prefix_cache=False), REQUESTS)
        assert {bucket.rows for bucket in buckets} <= set(range(1, LIMITS.slots + 1))
        assert runner.executable.buckets[-1].rows == DRAFTED.step_rows > LIMITS.slots
        warm_up(runner, 8, 8, plain=True)
        assert buckets[-1].rows > LIMITS.slots


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("most", "kept"), [(0, {False}), (1, {False, True}), (9, {True})], ids=["none", "one", "all"]
)
def test_only_steps_that_the_block_reads_keep_hidden_states(
    synthetic_model, monkeypatch, most, kept, ahead
):
    """The block reads sequences that begin while at most ``most`` run, and no others later."""
    monkeypatch.setattr(
        DraftPolicy, "should_follow", lambda self, tenant, running, *more: running <= most
    )
    monkeypatch.setattr(DraftBlock, "ready", lambda self, key, tokens: key in self._followed)
    path = drafting_model(synthetic_model, "qwen35")
    with TIERS["quick"]() as tier, drafting(path, tier) as (runner, block):
        steps = Steps(runner, monkeypatch)
        expected = run(engine_of(runner, None, prefix_cache=False), REQUESTS)
        assert set(steps.kept) == {False}
        steps.clear()
        engine = engine_of(runner, block, steps_ahead=ahead, prefix_cache=False)
        assert run(engine, REQUESTS) == expected
    assert set(steps.kept) == kept
    assert all(keeps for keeps, drafts in zip(steps.kept, steps.drafts, strict=True) if drafts)
    assert (engine.statistics.speculation.accepted > 5) == (most > 0)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "vulkan"])
def test_adapters_and_drafts_are_left_out_of_steps_without(
    synthetic_model, tmp_path, monkeypatch, tier, ahead
):
    """Requests with adapters, of which the first ends early, beside one without, with and without
    drafts: steps of all four forms, and the answers of a session that drafts nothing."""
    with adapted(synthetic_model(architecture="qwen3", quant="q4_k_m"), tmp_path) as model:
        limits = replace(DRAFTED, adapters=model.adapters.combined)
        requests = [
            replace(REQUESTS[0], adapters=((0, 1.0),), max_tokens=17),
            replace(REQUESTS[1], max_tokens=60),
            replace(REQUESTS[2], adapters=((0, -0.5), (1, 0.5)), max_tokens=9),
        ]
        with TIERS[tier]() as opened, ModelRunner(model, opened, limits) as runner:
            steps = Steps(runner, monkeypatch)
            expected = run(engine_of(runner, None, steps_ahead=ahead, prefix_cache=False), requests)
            steps.clear()
            told = {r.prompt: [event.token for event in expected[r.id]] for r in requests}
            options = EngineOptions(steps_ahead=ahead, prefix_cache=False, draft_tokens=5)
            engine = Engine(runner, options, drafter=Seldom(told, 1))
            assert run(engine, requests) == expected
            adapters = [ADAPTER_IDS in graph.buffers for graph in steps.graphs]
            assert steps.verified == steps.drafts
            assert len(set(zip(adapters, steps.drafts, strict=True))) == 4
    assert engine.statistics.speculation.accepted > 5


@contextmanager
def adapted(path: Path, folder: Path) -> Iterator[Model]:
    """The model of a file, with two adapters."""
    paths = [write_adapter(folder / f"{n}.gguf", path, rank=3 + n, seed=n) for n in (1, 2)]
    model = open_model(path, paths)
    try:
        yield model
    finally:
        model.close()


@pytest.mark.parametrize("tier", ["native", "opencl"])
def test_all_forms_of_a_step_are_planned(synthetic_model, tmp_path, tier):
    """With drafts, and with adapters, twice as many lowered steps each as without."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    plain, planned, taken = replace(DRAFTED, draft_tokens=0), [], []
    with adapted(path, tmp_path) as model:
        combined = model.adapters.combined
        for limits in (
            plain,
            DRAFTED,
            replace(plain, adapters=combined),
            replace(DRAFTED, adapters=combined),
        ):
            with TIERS[tier]() as opened:
                graph = model.graph(limits)
                footprint = opened.footprint(graph, limits.largest)
                planned.append(
                    plan_memory(graph, limits, footprint, opened.info.host_unified).variants
                )
                with ModelRunner(model, opened, limits) as runner:
                    before = opened.allocated_bytes
                    runner.prepare()
                    taken.append(opened.allocated_bytes - before)
    for fewer, more in ((0, 1), (0, 2), (1, 3), (2, 3)):
        assert taken[more] > 1.9 * taken[fewer]
        assert planned[more] - planned[fewer] >= taken[more] - taken[fewer]
