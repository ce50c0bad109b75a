"""EAGLE-3 heads: drafts by their formulas, and files that are not for the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ModelFileError, RequestError, UnsupportedModel, ZincError
from contract.types import Request, SamplingParams
from harness.host.drafting import open_draft_model
from harness.synth.eagle import HeadForm
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import TensorSource, write_gguf
from reference.model.open import open_model
from reference.sched.drafts import DraftPolicy
from tests.engine.headed_models import head_of, headed_model
from tests.engine.test_draft_block import DRAFTS, LIMITS, Observed, drafting, prompt, run
from tests.named_tiers import quick_tier
from tests.peer.float64_eagle import Float64Head
from tests.peer.float64_hybrid import Float64Hybrid
from tests.peer.float64_llama import Float64Llama

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
SyntheticModel = Callable[..., Path]
MODELS = {
    "plain": ("qwen3", HeadForm(), {}),
    "own parts": (
        "llama",
        HeadForm(own_embedding=True, fc_norm=True, normed_residual=True, hidden=128),
        {"rope_freqs": True},
    ),
    "nothing of its own": ("qwen3moe", HeadForm(own_output=False), {"tied": False}),
    "hybrid": ("qwen35", HeadForm(own_embedding=True, own_output=False), {}),
}


def model_of(synthetic_model: SyntheticModel, name: str) -> Path:
    architecture, form, fields = MODELS[name]
    named = {"architecture": architecture, "quant": "f32", "layers": 4, "seed": 3}
    return headed_model(synthetic_model, form, **named, **fields)


def truth_of(path: Path) -> Float64Head:
    head = head_of(path)
    assert head is not None
    kind = Float64Hybrid if path.name.startswith("qwen35") else Float64Llama
    return Float64Head(head, kind(path))


def difference(row: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(row - expected).max() / np.abs(expected).max())


def assert_follow(drafter: Observed, truth: Float64Head, without: frozenset[int]) -> None:
    """Attention rounds keys to 11 bits. Without the row before, logits are others."""
    assert len(drafter.drafted) > 3
    for tokens, row in drafter.drafted[:: 1 + len(drafter.drafted) // 8]:
        assert difference(row, truth.draft_logits(tokens, without)[-1]) < 3e-3
        other = truth.draft_logits(tokens, without | {len(tokens) - 1})[-1]
        assert difference(row, other) > 3e-2


@pytest.mark.parametrize("every", [1, 41], ids=["every step", "now and then"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_follow_the_formulas(synthetic_model: SyntheticModel, name: str, every: int) -> None:
    """Prompts in short chunks and in chunks longer than a ring, drafts after every step and after
    longer than a ring holds: the logits are those of the whole sequence in binary64."""
    path = model_of(synthetic_model, name)
    limits = replace(LIMITS, context=160, pages=40, step_tokens=112)
    requests = [
        Request(n, prompt(n, length), 60, SamplingParams()) for n, length in enumerate((9, 60, 95))
    ]
    with quick_tier() as tier, drafting(path, tier, limits) as (runner, block):
        drafter = Observed(block, every)
        options = EngineOptions(draft_tokens=DRAFTS, prefix_cache=False)
        run(Engine(runner, options, drafter=drafter), requests)
    assert_follow(drafter, truth_of(path), frozenset())


def test_a_prefix_hit_has_the_keys_of_the_head(
    synthetic_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cached prompt only the position behind it lacks the row before."""
    monkeypatch.setattr(DraftPolicy, "draft_count", lambda policy, own, running, most, *_: most)
    path = headed_model(synthetic_model, architecture="qwen3", quant="f32", layers=4, seed=5)
    with quick_tier() as tier, drafting(path, tier) as (runner, block):
        drafter = Observed(block, 1)
        engine = Engine(runner, EngineOptions(draft_tokens=DRAFTS), drafter=drafter)
        run(engine, [Request(0, prompt(0, 49), 6, SamplingParams())])
        drafter.drafted.clear()
        run(engine, [Request(1, (*prompt(0, 48), 5, 6), 12, SamplingParams())])
        assert engine.statistics.prefix.tokens_hit == 48
    assert_follow(drafter, truth_of(path), frozenset({48}))
    with pytest.raises(AssertionError):
        assert_follow(drafter, truth_of(path), frozenset())


def test_a_model_without_its_head_is_the_same(synthetic_model: SyntheticModel) -> None:
    """What a head reads is in the graph where hidden rows are kept, and nowhere else."""
    path = headed_model(synthetic_model, architecture="qwen3", quant="f32", layers=4, seed=5)
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


REFUSED = {
    "another width": ({"hidden": 128}, RequestError, "reads rows of 256 elements; .* have 128"),
    "fewer layers": ({"layers": 1}, RequestError, "reads layer 2; the model has 1"),
    "other tokens": ({"architecture": "gemma3"}, RequestError, "another vocabulary: token 0"),
    "fewer tokens": ({"vocab": 305}, RequestError, "drafts token 318; the model has 305 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_difference_is_named(synthetic_model: SyntheticModel, name: str) -> None:
    fields, error, message = REFUSED[name]
    path = headed_model(synthetic_model, architecture="qwen3", quant="f32", layers=4, seed=5)
    other = synthetic_model(**{"architecture": "qwen3", "quant": "f32", **fields})
    refuse(other, head_of(path), error, message)


def refuse(target: Path, head: Path | None, error: type[ZincError], message: str) -> None:
    assert head is not None
    with ExitStack() as owned:
        model = open_model(target)
        owned.callback(model.file.close)
        with pytest.raises(error, match=message):
            open_draft_model(head, model, owned)


KEYS = {
    "eagle3.block_count": (2, UnsupportedModel, "a head has one layer"),
    "eagle3.target_layers": ([1, 2], UnsupportedModel, "has 2 layers"),
    "eagle3.attention.sliding_window": (32, UnsupportedModel, "sliding_window: is 32"),
}


@pytest.mark.parametrize("key", KEYS)
def test_variants_are_refused(synthetic_model: SyntheticModel, tmp_path: Path, key: str) -> None:
    value, error, message = KEYS[key]
    path = headed_model(synthetic_model, architecture="qwen3", quant="f32", layers=4, seed=5)
    refuse(path, changed(path, tmp_path / "head.gguf", {key: value}), error, message)


def changed(
    model: Path, copy: Path, keys: dict[str, object], without: str = "", more: str = "",
    replaced: dict[str, TensorSource] | None = None,
) -> Path:  # fmt: skip
    """A copy of a model's head with other keys, without a tensor, with one ``more``, and with some
    replaced."""
    head = head_of(model)
    assert head is not None
    with open_gguf(head) as file:
        kept = (info for info in file.tensors.values() if info.name != without)
        tensors = {i.name: (i.ggml_type, i.shape, file._view(i).tobytes()) for i in kept}
        if more:
            tensors[more] = next(iter(tensors.values()))
        tensors |= replaced or {}  # type: ignore[arg-type]
        write_gguf(copy, {**file.metadata, **keys}, tensors)  # type: ignore[dict-item]
    return copy


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        ("fc.weight", ModelFileError, "tensor fc.weight: is missing"),
        ("blk.0.attn_norm_2.weight", ModelFileError, "attn_norm_2.weight: is missing"),
        ("output.weight", RequestError, "no output.weight, but 160 tokens of its own"),
    ],
)
def test_a_missing_tensor_is_named(
    synthetic_model: SyntheticModel, tmp_path: Path, tensor: str, error: type[ZincError],
    message: str,
) -> None:  # fmt: skip
    path = headed_model(synthetic_model, architecture="qwen3", quant="f32", layers=4, seed=5)
    refuse(path, changed(path, tmp_path / "head.gguf", {}, tensor), error, message)


@pytest.mark.parametrize("tensor", ["enc.output_norm.weight", "fc.weight_scale", "d2t.weight"])
def test_a_tensor_that_no_formula_reads_is_refused(
    synthetic_model: SyntheticModel, tmp_path: Path, tensor: str
) -> None:
    """A norm of the inputs counts where the file says that they are normed."""
    path = headed_model(synthetic_model, architecture="qwen3", quant="f32", layers=4, seed=5)
    copy = changed(path, tmp_path / "head.gguf", {}, more=tensor)
    refuse(path, copy, UnsupportedModel, f"{tensor}: is not part of a eagle3 model")
