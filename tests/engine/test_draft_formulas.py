"""Drafts of blocks and of heads by their formulas in binary64."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from contract.types import Request, SamplingParams
from harness.host.drafting import open_draft_model
from harness.synth.dflash import BlockForm
from harness.synth.eagle import HeadForm
from reference.engine import Engine, EngineOptions
from reference.engine.dflash import DFlashDrafter, drafting_limits
from reference.engine.draft_block import DraftBlock
from reference.engine.drafter import DraftRequest, Tokens
from reference.limits import Limits
from reference.model.dflash import DFlashHead
from reference.model.open import open_model
from reference.runner import LOGITS, ModelRunner, StepInput, StepOutput, Submission
from reference.sched.drafts import DraftPolicy
from tests.engine.headed_models import block_model, changed, head_of, headed_model
from tests.engine.test_draft_block import ARCHITECTURES, DRAFTS, LIMITS, drafting, prompt, run
from tests.named_tiers import quick_tier
from tests.peer.float64_dflash import Float64Block
from tests.peer.float64_eagle import Float64Head
from tests.peer.float64_hybrid import Float64Hybrid
from tests.peer.float64_llama import Float64Llama
from tests.peer.float64_model import float64_model

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
SyntheticModel = Callable[..., Path]
Drafted = list[tuple[list[int], np.ndarray]]
TOLERANCE = dict.fromkeys(ARCHITECTURES, 1e-3) | {"glm4moe": 3e-3, "deepseek2": 3e-3}
"""Of logits: what attention rounds, which the factor of experts makes larger in some."""
OF_HEADS = 3e-3
HEADS: dict[str, tuple[str, HeadForm | BlockForm, dict[str, Any]]] = {
    "eagle": ("qwen3", HeadForm(), {}),
    "eagle, own parts": (
        "llama",
        HeadForm(own_embedding=True, fc_norm=True, normed_residual=True, hidden=128),
        {"rope_freqs": True},
    ),
    "eagle, nothing of its own": ("qwen3moe", HeadForm(own_output=False), {"tied": False}),
    "eagle, hybrid": ("qwen35", HeadForm(own_embedding=True, own_output=False), {}),
    "dflash": ("qwen3", BlockForm(), {}),
    "dflash, own parts": ("llama", BlockForm(layers=1, own_embedding=True, own_output=True), {}),
    "dflash, windows": ("qwen3moe", BlockForm(window=24), {"tied": False}),
    "dflash, hybrid": ("qwen35", BlockForm(own_embedding=True), {}),
}
CHAINED = (*ARCHITECTURES, *(name for name in HEADS if name.startswith("eagle")))
BLOCKS = [name for name in HEADS if name.startswith("dflash")]


def path_of(synthetic_model: SyntheticModel, name: str) -> Path:
    """A model with a draft block, or one with a head in a file beside it."""
    if name not in HEADS:
        return synthetic_model(architecture=name, quant="f32", nextn_layers=1, seed=3)
    architecture, form, fields = HEADS[name]
    fields = {"architecture": architecture, "quant": "f32", "layers": 4, "seed": 3, **fields}
    if isinstance(form, BlockForm):
        return block_model(synthetic_model, form, **fields)
    return headed_model(synthetic_model, form, **fields)


def truth_of(path: Path, name: str) -> Any:
    head = head_of(path)
    if head is None:
        return float64_model(path)
    kind = Float64Hybrid if path.name.startswith("qwen35") else Float64Llama
    return (Float64Block if name in BLOCKS else Float64Head)(head, kind(path))


class Observed(DraftBlock):
    """A draft block whose logits are compared with the formulas'. It drafts only where the number
    of known tokens is a multiple of ``every``."""

    def __init__(self, runner: ModelRunner, every: int) -> None:
        super().__init__(runner)
        self._runner = _WithLogits(runner)  # type: ignore[assignment]
        self._every = every
        self.drafted: Drafted = []

    def ready(self, key: int, tokens: Tokens) -> bool:
        return super().ready(key, tokens) and len(tokens) % self._every == 0

    def begin(self, sequences: Sequence[DraftRequest]) -> list[Tokens]:
        seen = self._runner.logits = {}  # type: ignore[attr-defined]
        drafts = self.draft(sequences)
        active = [one for one, draft in zip(sequences, drafts, strict=True) if len(draft)]
        for one, row in zip(active, seen[min(seen)] if seen else (), strict=True):
            self.drafted.append((one.tokens.tolist(), row))
        return drafts


class _WithLogits:
    """A runner that asks for the logits of every step and has them, by the step's first event."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner, self.limits = inner, inner.limits
        self.frequent_tokens = inner.frequent_tokens
        self.logits: dict[int, np.ndarray] = {}

    def submit(self, inputs: StepInput) -> Submission:
        return self.inner.submit(replace(inputs, requested=(LOGITS,)))

    def collect(self, submission: Submission) -> StepOutput:
        output = self.inner.collect(submission)
        self.logits[submission.first_event] = output.logits.copy()
        return output

    def step(self, inputs: StepInput) -> StepOutput:
        return self.collect(self.submit(inputs))


def difference(row: np.ndarray, expected: np.ndarray) -> float:
    """Of the logits that a drafter computed, which may be those of frequent tokens alone."""
    expected = expected[..., : row.shape[-1]]
    return float(np.abs(row - expected).max() / np.abs(expected).max())


def assert_follow(drafted: Drafted, truth: Any, name: str, without: frozenset[int]) -> None:
    """Attention rounds keys to 11 bits. Without the row before, logits of a head are others."""
    assert len(drafted) > 3
    for tokens, row in drafted[:: 1 + len(drafted) // 8]:
        expected = truth.draft_logits(tokens, without)[-1]
        assert difference(row, expected) < TOLERANCE.get(name, OF_HEADS)
        if name in HEADS:
            other = truth.draft_logits(tokens, without | {len(tokens) - 1})[-1]
            assert difference(row, other) > 10 * OF_HEADS


@pytest.mark.parametrize("every", [1, 41], ids=["every step", "now and then"])
@pytest.mark.parametrize("name", CHAINED)
def test_drafts_follow_the_formulas(synthetic_model, name, every):
    """Prompts in short chunks and in chunks longer than a ring, drafts after every step and after
    longer than a ring holds: the logits are those of the whole sequence in binary64."""
    path = path_of(synthetic_model, name)
    limits = replace(LIMITS, context=160, pages=40, step_tokens=112)
    requests = [
        Request(n, prompt(n, length), 60, SamplingParams()) for n, length in enumerate((9, 60, 95))
    ]
    with quick_tier() as tier, drafting(path, tier, limits) as (runner, block):
        drafter = Observed(block, every)
        options = EngineOptions(draft_tokens=DRAFTS, prefix_cache=False)
        run(Engine(runner, options, drafter=drafter), requests)
    assert_follow(drafter.drafted, truth_of(path, name), name, frozenset())


@pytest.fixture
def as_many_as_fit(monkeypatch) -> None:
    monkeypatch.setattr(DraftPolicy, "draft_count", lambda policy, own, running, most, *_: most)


@pytest.mark.parametrize("name", ["qwen35", "eagle"])
@pytest.mark.usefixtures("as_many_as_fit")
def test_a_prefix_hit_has_its_keys(synthetic_model, name):
    """Of a cached prompt only the position behind it lacks the state before. Wrong drafts of the
    first request do not end those of the second."""
    path = path_of(synthetic_model, name)
    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        drafter = Observed(block, 1)
        engine = Engine(runner, EngineOptions(draft_tokens=DRAFTS), drafter=drafter)
        run(engine, [Request(0, prompt(0, 49), 6, SamplingParams())])
        drafter.drafted.clear()
        run(engine, [Request(1, (*prompt(0, 48), 5, 6), 12, SamplingParams())])
        assert engine.statistics.prefix.tokens_hit == 48
    truth = truth_of(path, name)
    assert_follow(drafter.drafted, truth, name, frozenset({48}))
    with pytest.raises(AssertionError):
        assert_follow(drafter.drafted, truth, name, frozenset())


def test_a_model_without_its_head_is_the_same(synthetic_model):
    """What a head reads is in the graph where hidden rows are kept, and nowhere else."""
    path = path_of(synthetic_model, "eagle")
    head = head_of(path)
    assert head is not None
    with ExitStack() as owned:
        plain = open_model(path)
        owned.callback(plain.file.close)
        headed, draft = open_draft_model(head, plain, owned)
        assert draft is None
        limits = Limits(slots=1, context=64, pages=4)
        assert headed.graph(limits) == plain.graph(limits)
        kept = replace(limits, hidden_rows=8)
        names = {node.name for node in headed.graph(kept).nodes}
        assert {"auxiliary_state[0]", "auxiliary_state[2]", "auxiliary_fuse"} < names
        assert "auxiliary_fuse" not in {node.name for node in plain.graph(kept).nodes}


class ObservedBlocks(DFlashDrafter):
    """A drafter that keeps the tokens, the number of drafts and the logits of each block."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner.model.head, DFlashHead)
        super().__init__(runner, runner.model.head)
        self.blocks: list[tuple[list[int], int, np.ndarray]] = []
        self._runner = _WithLogits(runner)  # type: ignore[assignment]

    def draft(self, sequences: Sequence[DraftRequest]) -> list[Tokens]:
        seen = self._runner.logits = {}  # type: ignore[attr-defined]
        drafts = super().draft(sequences)
        row = 0
        for one, draft in zip(sequences, drafts, strict=True):
            if len(draft):
                rows = seen[max(seen)][row : row + len(draft)]
                self.blocks.append((one.tokens.tolist(), len(draft), rows))
            row += len(draft)
        return drafts


def assert_blocks_follow(
    blocks: list[tuple[list[int], int, np.ndarray]], truth: Float64Block
) -> None:
    """Rows that see only rows before them, or nothing that the model computed, give others."""
    assert len(blocks) > 8
    assert max(count for _, count, _ in blocks) in (3, DRAFTS)
    longest_first = sorted(blocks, key=lambda block: -len(block[0]))
    for tokens, count, rows in longest_first[:: 1 + len(blocks) // 6]:
        assert difference(rows, truth.block_logits(tokens, count)) < OF_HEADS
        assert difference(rows, truth.block_logits(tokens, count, kept=False)) > 10 * OF_HEADS
        if count > 1:
            assert difference(rows, truth.block_logits(tokens, count, causal=True)) > 10 * OF_HEADS


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.usefixtures("as_many_as_fit")
def test_drafts_of_blocks_follow_the_formulas(synthetic_model, name):
    """Blocks of several sequences in one step, behind prompts in chunks, over page ends, and of a
    prefix that the cache has."""
    path = path_of(synthetic_model, name)
    limits = replace(LIMITS, context=160, pages=40)
    sampling = SamplingParams()
    requests = [Request(n, prompt(n, length), 12, sampling) for n, length in enumerate((9, 60))]
    with quick_tier() as tier, drafting(path, tier, limits) as (runner, head):
        drafter = ObservedBlocks(head)
        engine = Engine(runner, EngineOptions(draft_tokens=DRAFTS), drafter=drafter)
        run(engine, requests)
        first = len(drafter.blocks)
        run(engine, [Request(3, (*prompt(1, 48), 5, 6), 12, sampling)])
        assert engine.statistics.prefix.tokens_hit or runner.model.config.recurrent
    truth = truth_of(path, name)
    assert_blocks_follow(drafter.blocks[:first], truth)
    assert_blocks_follow(drafter.blocks[first:], truth)


@pytest.mark.usefixtures("as_many_as_fit")
def test_a_block_has_no_more_rows_than_the_head_was_made_for(synthetic_model, tmp_path):
    path = path_of(synthetic_model, "dflash")
    changed(path, tmp_path / "short.head", {"dflash.block_size": 3})
    (tmp_path / "short.gguf").hardlink_to(path)
    with quick_tier() as tier, drafting(tmp_path / "short.gguf", tier) as (runner, head):
        drafter = ObservedBlocks(head)
        engine = Engine(runner, EngineOptions(draft_tokens=DRAFTS), drafter=drafter)
        run(engine, [Request(0, prompt(0, 9), 12, SamplingParams())])
    assert {count for _, count, _ in drafter.blocks[:-1]} == {2}
    limits = [drafting_limits(LIMITS, 9, cast(Any, SimpleNamespace(block_size=n))) for n in (4, 16)]
    assert [one.draft_tokens for one in limits] == [3, 9]


@pytest.mark.parametrize(("known", "drafts"), [(10, 6), (15, 1), (16, 0)])
def test_a_block_ends_in_the_pages_of_its_sequence(known, drafts):
    """One page: a row behind it would overwrite keys of another sequence."""
    drafter = DFlashDrafter(cast(Any, None), cast(Any, SimpleNamespace(block_size=16)))
    drafter.attach(cast(Any, SimpleNamespace(page_count=[1])), lambda sequence: True)
    drafter._decided[0] = True
    tokens = np.arange(known, dtype=np.int32)
    assert drafter._bounded(DraftRequest(0, 0, tokens, 9)).limit == drafts
