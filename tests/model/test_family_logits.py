"""Every family and variant against its formulas in float64, and against itself in other chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from contract.types import Request
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.model.families.tensors import Limits
from reference.model.open import open_model
from reference.runner import Capacity, ModelRunner
from tests.model.family_files import (
    HIDDEN,
    KEY_HEADS,
    LAYERS,
    STATE,
    VOCAB,
    FamilyFile,
    family_file,
    make_gemma4_moe,
    make_gemma4_per_layer,
    make_mixtral,
)
from tests.model.float64_families import Float64Model

TOKENS = tuple((5 + 37 * n) % VOCAB for n in range(21))
"""More than a page, more than a window, and no multiple of anything."""


def separate_gate_up(file: FamilyFile) -> FamilyFile:
    """Expert gates and ups stacked in one tensor, gates first."""
    for layer in range(LAYERS):
        prefix = f"blk.{layer}.ffn"
        file.stack(
            f"{prefix}_gate_up_exps.weight",
            f"{prefix}_gate_exps.weight",
            f"{prefix}_up_exps.weight",
            axis=1,
        )
    return file


def legacy_ssm_in(file: FamilyFile) -> FamilyFile:
    """Query, key, values and gates of a delta net by key head, in one tensor."""
    for layer in range(0, LAYERS, 2):
        prefix = f"blk.{layer}"
        rows = file.values.pop(f"{prefix}.attn_qkv.weight")
        keys = KEY_HEADS * STATE
        for name, part in zip("qkv", np.split(rows, [keys, 2 * keys]), strict=True):
            file.values[name] = part
        file.interleave(
            f"{prefix}.ssm_in.weight", KEY_HEADS, "q", "k", "v", f"{prefix}.attn_gate.weight"
        )
    return file


def own_head(file: FamilyFile) -> FamilyFile:
    """A head apart from the embedding."""
    file.rows("output", VOCAB)
    return file


def shared_kv_of_both_kinds() -> FamilyFile:
    """Six layers: the last two read the sliding and the full layer before them."""
    pattern = [True, True, True, False, True, False]
    file = family_file(
        "gemma4",
        block_count=6,
        attention__sliding_window_pattern=pattern,
        attention__head_count_kv=[2 if sliding else 1 for sliding in pattern],
    )
    return make_gemma4_per_layer(file)


def gemma3_27b() -> FamilyFile:
    """The depth of the one model that scales by the residual width, with heads to tell."""
    return family_file("gemma3", block_count=62, attention__sliding_window_pattern=6)


def with_nextn(file: FamilyFile) -> FamilyFile:
    """A drafting block behind the last layer."""
    file.keys.update({"block_count": LAYERS + 1, "nextn_predict_layers": 1})
    file.rows(f"blk.{LAYERS}.nextn.eh_proj", HIDDEN, 2 * HIDDEN)
    file.vector(f"blk.{LAYERS}.attn_norm")
    return file


VARIANTS: dict[str, Callable[[], FamilyFile]] = {
    "llama": lambda: family_file("llama"),
    "llama experts": lambda: make_mixtral(family_file("llama")),
    "qwen2": lambda: own_head(family_file("qwen2")),
    "qwen3": lambda: family_file("qwen3"),
    "qwen3moe": lambda: family_file("qwen3moe"),
    "qwen3moe stacked experts": lambda: separate_gate_up(family_file("qwen3moe")),
    "qwen35": lambda: family_file("qwen35"),
    "qwen35 nextn": lambda: with_nextn(family_file("qwen35")),
    "qwen35 listed layers": lambda: family_file(
        "qwen35", full_attention_interval=3, attention__recurrent_layers=[True, False] * 2
    ),
    "qwen35moe": lambda: family_file("qwen35moe"),
    "qwen3next": lambda: family_file("qwen3next"),
    "qwen3next ssm_in": lambda: legacy_ssm_in(family_file("qwen3next")),
    "gemma3": lambda: family_file("gemma3"),
    "gemma3 capped": lambda: own_head(family_file("gemma3", final_logit_softcapping=2.0)),
    "gemma3 without windows": lambda: family_file("gemma3", attention__sliding_window=0),
    "gemma3 27b": gemma3_27b,
    "gemma4": lambda: family_file("gemma4"),
    "gemma4 experts": lambda: make_gemma4_moe(family_file("gemma4")),
    "gemma4 shared": shared_kv_of_both_kinds,
}


def logits(path: Path, chunk: int) -> np.ndarray:
    """All logits of TOKENS on the CPU tier, ``chunk`` tokens a step."""
    limits = Limits(slots=2, context=64, pages=8)
    parts: list[np.ndarray] = []
    model = open_model(path)
    with CpuTier() as tier, ModelRunner(model, tier, limits, Capacity(32, 32)) as runner:
        engine = Engine(runner, chunk_tokens=chunk)
        engine.submit(Request(1, TOKENS, 0), lambda _, rows: parts.append(rows))
        list(engine.run())
    model.file.close()
    return np.concatenate(parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_follow_the_formulas_in_any_chunks(variant: str, tmp_path: Path) -> None:
    file = VARIANTS[variant]()
    path = file.write(tmp_path / "model.gguf")
    ours = logits(path, len(TOKENS))
    truth = Float64Model(file.architecture, file.keys, file.values).logits(TOKENS)
    assert np.abs(ours - truth).max() < 1e-4 * np.abs(truth).max()
    for chunk in (1, 4):
        assert np.array_equal(logits(path, chunk), ours)


MISTAKES: dict[str, tuple[str, Callable[[FamilyFile], object]]] = {
    "value heads by key head": ("qwen35", lambda file: setattr(file, "architecture", "qwen3next")),
    "value heads in turn": ("qwen3next", lambda file: setattr(file, "architecture", "qwen35moe")),
    "one token more in a window": (
        "gemma3",
        lambda file: file.keys.update({"attention.sliding_window": 6}),
    ),
    "factors in sliding layers only": ("gemma4", lambda file: file.values.pop("rope_freqs.weight")),
    "one rope base": ("gemma3", lambda file: file.keys.update({"rope.freq_base_swa": 1e6})),
    "an expert more": ("qwen3moe", lambda file: file.keys.update({"expert_used_count": 3})),
    "no output scale": (
        "gemma4",
        lambda file: file.values.pop("blk.1.layer_output_scale.weight"),
    ),
    "no soft-cap": ("gemma4", lambda file: file.keys.update({"final_logit_softcapping": 0.0})),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tolerance_would_show_a_mistake(mistake: str) -> None:
    """Negative control: the formulas with one mistake leave the tolerance far behind."""
    variant, change = MISTAKES[mistake]
    right, wrong = VARIANTS[variant](), VARIANTS[variant]()
    change(wrong)
    truth, other = (
        Float64Model(file.architecture, file.keys, file.values).logits(TOKENS)
        for file in (right, wrong)
    )
    assert np.abs(other - truth).max() > 1e-3 * np.abs(truth).max()
