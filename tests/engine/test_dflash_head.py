"""DFlash heads: drafts by their formulas, and files that are not for the model or not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from contract.errors import ModelFileError, RequestError, UnsupportedModel, ZincError
from contract.types import Request, SamplingParams
from harness.synth.dflash import BlockForm
from reference.engine import Engine, EngineOptions
from reference.engine.dflash import DFlashDrafter, drafting_limits
from reference.engine.drafter import DraftRequest, Tokens
from reference.model.dflash import DFlashHead
from reference.runner import LOGITS, ModelRunner, StepInput, StepOutput
from reference.sched.drafts import DraftPolicy
from tests.engine.headed_models import block_model, head_of
from tests.engine.test_draft_block import DRAFTS, LIMITS, drafting, prompt, run
from tests.engine.test_eagle_head import changed, difference, refuse
from tests.named_tiers import quick_tier
from tests.peer.float64_dflash import Float64Block
from tests.peer.float64_hybrid import Float64Hybrid
from tests.peer.float64_llama import Float64Llama

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
SyntheticModel = Callable[..., Path]
MODELS = {
    "plain": ("qwen3", BlockForm(), {}),
    "own parts": ("llama", BlockForm(layers=1, own_embedding=True, own_output=True), {}),
    "windows": ("qwen3moe", BlockForm(window=24), {"tied": False}),
    "hybrid": ("qwen35", BlockForm(own_embedding=True), {}),
}


def model_of(synthetic_model: SyntheticModel, name: str) -> Path:
    architecture, form, fields = MODELS[name]
    named = {"architecture": architecture, "quant": "f32", "layers": 4, "seed": 3}
    return block_model(synthetic_model, form, **named, **fields)


def truth_of(path: Path) -> Float64Block:
    head = head_of(path)
    assert head is not None
    kind = Float64Hybrid if path.name.startswith("qwen35") else Float64Llama
    return Float64Block(head, kind(path))


class Observed(DFlashDrafter):
    """A drafter that keeps the tokens, the number of drafts and the logits of each block."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner.model.head, DFlashHead)
        super().__init__(runner, runner.model.head)
        self.blocks: list[tuple[list[int], int, np.ndarray]] = []
        self._logits = np.zeros((0, 0), np.float32)
        self._runner = _WithLogits(runner, self)  # type: ignore[assignment]

    def draft(self, sequences: Sequence[DraftRequest]) -> list[Tokens]:
        drafts = super().draft(sequences)
        row = 0
        for one, draft in zip(sequences, drafts, strict=True):
            rows = self._logits[row : row + len(draft)]
            if len(draft):
                self.blocks.append((one.tokens.tolist(), len(draft), rows))
            row += len(draft)
        return drafts


class _WithLogits:
    """A runner that hands the logits of every step to ``observed``."""

    def __init__(self, inner: ModelRunner, observed: Observed) -> None:
        self.inner, self.observed = inner, observed

    def step(self, inputs: StepInput) -> StepOutput:
        output = self.inner.step(replace(inputs, requested=(LOGITS,)))
        self.observed._logits = output.logits.copy()
        return output


def assert_follow(blocks: list[tuple[list[int], int, np.ndarray]], truth: Float64Block) -> None:
    """Attention rounds keys to 11 bits. Rows that see only rows before them, or nothing that the
    model computed, give others."""
    assert len(blocks) > 8
    assert max(count for _, count, _ in blocks) in (3, DRAFTS)
    for tokens, count, rows in sorted(blocks, key=lambda block: -len(block[0]))[
        :: 1 + len(blocks) // 6
    ]:
        assert difference(rows, truth.block_logits(tokens, count)) < 3e-3
        assert difference(rows, truth.block_logits(tokens, count, kept=False)) > 3e-2
        if count > 1:
            assert difference(rows, truth.block_logits(tokens, count, causal=True)) > 3e-2


@pytest.mark.parametrize("name", MODELS)
def test_drafts_follow_the_formulas(
    synthetic_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Blocks of several sequences in one step, behind prompts in chunks, over page ends, and of a
    prefix that the cache has."""
    monkeypatch.setattr(
        DraftPolicy, "draft_count", lambda policy, own, running, most, unread=0: most
    )
    path = model_of(synthetic_model, name)
    limits = replace(LIMITS, context=160, pages=40)
    sampling = SamplingParams()
    requests = [Request(n, prompt(n, length), 12, sampling) for n, length in enumerate((9, 60))]
    with quick_tier() as tier, drafting(path, tier, limits) as (runner, head):
        drafter = Observed(head)
        engine = Engine(runner, EngineOptions(draft_tokens=DRAFTS), drafter=drafter)
        run(engine, requests)
        first = len(drafter.blocks)
        run(engine, [Request(3, (*prompt(1, 48), 5, 6), 12, sampling)])
        assert engine.statistics.prefix.tokens_hit or runner.model.config.recurrent
    truth = truth_of(path)
    assert_follow(drafter.blocks[:first], truth)
    assert_follow(drafter.blocks[first:], truth)


def test_a_block_has_no_more_rows_than_the_head_was_made_for(
    synthetic_model: SyntheticModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DraftPolicy, "draft_count", lambda policy, own, running, most, unread=0: most
    )
    path = model_of(synthetic_model, "plain")
    changed(path, tmp_path / "short.head", {"dflash.block_size": 3})
    (tmp_path / "short.gguf").hardlink_to(path)
    with quick_tier() as tier, drafting(tmp_path / "short.gguf", tier) as (runner, head):
        drafter = Observed(head)
        engine = Engine(runner, EngineOptions(draft_tokens=DRAFTS), drafter=drafter)
        run(engine, [Request(0, prompt(0, 9), 12, SamplingParams())])
    assert {count for _, count, _ in drafter.blocks[:-1]} == {2}


def test_room_is_made_for_no_more_drafts_than_a_block_has() -> None:
    limits = [drafting_limits(LIMITS, 9, cast(Any, SimpleNamespace(block_size=n))) for n in (4, 16)]
    assert [one.draft_tokens for one in limits] == [3, 9]


@pytest.mark.parametrize(("known", "drafts"), [(10, 6), (15, 1), (16, 0)])
def test_a_block_ends_in_the_pages_of_its_sequence(known: int, drafts: int) -> None:
    """One page: a row behind it would overwrite keys of another sequence."""
    drafter = DFlashDrafter(cast(Any, None), cast(Any, SimpleNamespace(block_size=16)))
    drafter.attach(cast(Any, SimpleNamespace(page_count=[1])), lambda sequence: True)
    drafter._decided[0] = True
    tokens = np.arange(known, dtype=np.int32)
    assert drafter._bounded(DraftRequest(0, 0, tokens, 9)).limit == drafts


REFUSED = {
    "another width": ({"hidden": 128}, "a DFlash head that reads rows of 256 elements; .* 128"),
    "fewer layers": ({"layers": 1}, "reads layer 3; the model has 1"),
    "other tokens": ({"architecture": "gemma3"}, "another vocabulary: token 0"),
    "fewer tokens": ({"vocab": 305}, "mask token 319; the model has 305 tokens"),
    "one token less": ({"vocab": 319}, "mask token 319; the model has 319 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_difference_is_named(synthetic_model: SyntheticModel, name: str) -> None:
    fields, message = REFUSED[name]
    path = model_of(synthetic_model, "plain")
    named = {"architecture": "qwen3", "quant": "f32", "layers": 4}
    other = synthetic_model(**{**named, **fields})
    refuse(other, head_of(path), RequestError, message)


KEYS = {
    "dflash.hyper_connection.count": (4, "hyper-connections"),
    "dflash.attention.causal": (True, "only non-causal models"),
    "dflash.sample_from_anchor": (True, "the row of the last token"),
    "dflash.hidden_activation": ("gelu", "heads with silu"),
    "dflash.expert_count": (8, "expert_count: is 8"),
}


@pytest.mark.parametrize("key", KEYS)
def test_variants_are_refused(synthetic_model: SyntheticModel, tmp_path: Path, key: str) -> None:
    value, message = KEYS[key]
    path = model_of(synthetic_model, "plain")
    copy = changed(path, tmp_path / "head.gguf", {key: value})
    refuse(path, copy, UnsupportedModel, message)


PARTS = {
    "markov_w1.weight": "Markov head",
    "conf_proj.weight": "confidence head",
    "selector_hidden.weight": "selector",
    "blk.0.attn_conv_base": "convolution",
    "blk.1.ffn_conv_proj.weight": "convolution",
    "blk.0.hc_attn_fn.weight": "hyper-connections",
    "blk.0.attn_k.bias": "changes keys or values",
    "blk.1.attn_v.scale": "changes keys or values",
    "blk.0.something.weight": "is not part of a dflash model",
    "blk.weight": "is not part of a dflash model",
    "fc.weight_scale": "is not part of a dflash model",
    "enc.output_norm.weight2": "is not part of a dflash model",
    "d2t.weight": "is not part of a dflash model",
}


@pytest.mark.parametrize("tensor", PARTS)
def test_parts_of_newer_heads_are_named(
    synthetic_model: SyntheticModel, tmp_path: Path, tensor: str
) -> None:
    path = model_of(synthetic_model, "plain")
    copy = changed(path, tmp_path / "head.gguf", {}, more=tensor)
    refuse(path, copy, UnsupportedModel, f"{tensor}: .*{PARTS[tensor]}")


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        ("fc.weight", ModelFileError, "tensor fc.weight: is missing"),
        ("blk.1.attn_k_norm.weight", ModelFileError, "attn_k_norm.weight: is missing"),
        ("output_norm.weight", ModelFileError, "output_norm.weight: is missing"),
    ],
)
def test_a_missing_tensor_is_named(
    synthetic_model: SyntheticModel, tmp_path: Path, tensor: str, error: type[ZincError],
    message: str,
) -> None:  # fmt: skip
    path = model_of(synthetic_model, "plain")
    refuse(path, changed(path, tmp_path / "head.gguf", {}, tensor), error, message)
