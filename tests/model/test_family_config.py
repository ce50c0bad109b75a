"""The keys of experts, delta nets and windows: what they mean, and what is refused how."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.config.read import READERS
from reference.model.families import FAMILIES
from reference.model.gguf.types import GgufType
from reference.model.gguf.writer import Typed
from tests.families_table import FAMILIES as TABLE
from tests.model.family_file import HIDDEN, FamilyFile, config_of
from tests.model.family_files import family_file
from tests.model.family_parts import (
    EXPERT_WIDTH,
    FEED_FORWARD,
    FULL_HEAD_DIM,
    HEAD_DIM,
    HEADS,
    LAYERS,
    SHARED_WIDTH,
    WINDOW,
)
from tests.model.family_variants import make_gemma4_moe, make_gemma4_per_layer, make_mixtral


def test_every_reader_has_a_family() -> None:
    assert set(READERS) == set(FAMILIES)


def test_the_table_that_peers_are_compared_by_has_every_family() -> None:
    """``tests/peer`` compares each of its files, but for two variants, with llama.cpp."""
    assert {fields["architecture"] for fields in TABLE.values()} == set(FAMILIES)


@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - {"deepseek2", "mamba2"}))
def test_the_least_metadata(architecture: str, tmp_path: Path) -> None:
    """Keys that are not required may all be missing; sizes then follow from each other, but for
    those of latent rows. Mamba-2 has no heads."""
    file = family_file(architecture)
    optional = ("context", "rope", "attention.key_length", "attention.value_length")
    needed = ("context_length", "rope.dimension_sections", "attention.key_length_swa")
    for key in list(file.keys):
        if key.startswith(optional) and not key.startswith(needed):
            del file.keys[key]
    if architecture == "gemma4":
        file.keys["rope.dimension_count_swa"] = HEAD_DIM
    config = config_of(file, tmp_path)
    assert config.layers == config.blocks == LAYERS
    full = config.attention_layers[-1]
    assert config.head_dims[full] == config.ropes[full].dims == HIDDEN // HEADS
    assert {rope.base for rope in config.ropes} == {10000.0}
    assert config.kv_layers == tuple(range(LAYERS))


def test_arrays_cover_the_drafting_blocks(tmp_path: Path) -> None:
    """block_count entries are needed; those of blocks that draft are not layers."""
    file = family_file("qwen35")
    file.keys.update(
        {
            "block_count": LAYERS + 1,
            "nextn_predict_layers": 1,
            "feed_forward_length": [FEED_FORWARD] * LAYERS + [8],
        }
    )
    config = config_of(file, tmp_path)
    assert (config.layers, config.blocks) == (LAYERS, LAYERS + 1)
    assert config.feed_forward == (FEED_FORWARD,) * LAYERS


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, EXPERT_WIDTH),
        ({"expert_feed_forward_length": 0}, FEED_FORWARD // 2),
        ({"expert_feed_forward_length": None}, FEED_FORWARD // 2),
        ({"expert_feed_forward_length": [EXPERT_WIDTH] * LAYERS}, EXPERT_WIDTH),
    ],
)
def test_expert_widths(change: dict[str, Any], width: int, tmp_path: Path) -> None:
    config = config_of(changed(family_file("qwen3moe"), change), tmp_path)
    assert config.experts is not None
    assert config.experts.widths == (width,) * LAYERS


def test_mixtral_experts_are_as_wide_as_a_dense_block(tmp_path: Path) -> None:
    experts = config_of(make_mixtral(family_file("llama")), tmp_path).experts
    assert experts is not None
    assert experts.widths == (FEED_FORWARD,) * LAYERS


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, SHARED_WIDTH),
        ({"expert_shared_feed_forward_length": None}, SHARED_WIDTH),
        ({"expert_shared_feed_forward_length": 64}, 64),
    ],
)
def test_width_of_the_shared_expert(change: dict[str, Any], width: int, tmp_path: Path) -> None:
    """The key decides; files without it have the width in the tensor."""
    experts = config_of(changed(family_file("qwen3next"), change), tmp_path).experts
    assert experts is not None
    assert experts.shared_width == width


def test_which_layers_are_recurrent(tmp_path: Path) -> None:
    """Every fourth attends unless the file says otherwise; a list of layers decides alone."""
    file = family_file("qwen35")
    net = config_of(file, tmp_path).delta_net
    assert net is not None
    assert net.layers == (True, False, True, False)
    del file.keys["full_attention_interval"]
    assert config_of(file, tmp_path).attention_layers == (3,)
    file.keys["attention.recurrent_layers"] = [False, True, True, False]
    assert config_of(file, tmp_path).attention_layers == (0, 3)


def test_gemma3_windows(tmp_path: Path) -> None:
    """A period, its default of 6, or one flag a layer; no window is no sliding layer."""
    file = family_file("gemma3")
    config = config_of(file, tmp_path)
    assert config.windows == (WINDOW, 0, WINDOW, 0)
    assert [rope.base for rope in config.ropes] == [1e4, 1e6, 1e4, 1e6]
    assert [rope.scaling.factor for rope in config.ropes] == [1.0, 8.0, 1.0, 8.0]
    assert config.attention_scales == (1 / math.sqrt(HEAD_DIM),) * LAYERS
    del file.keys["attention.sliding_window_pattern"]
    assert config_of(file, tmp_path).windows == (WINDOW,) * LAYERS
    file.keys["attention.sliding_window_pattern"] = [False, False, True, False]
    assert config_of(file, tmp_path).windows == (0, 0, WINDOW, 0)
    file.keys["attention.sliding_window"] = 0
    config = config_of(file, tmp_path)
    assert config.windows == (0,) * LAYERS
    assert len(set(config.ropes)) == 1


def test_only_62_layers_scale_by_the_residual_width(tmp_path: Path) -> None:
    config = config_of(family_file("gemma3", block_count=62), tmp_path)
    assert config.attention_scales == (1 / math.sqrt(HIDDEN / HEADS),) * 62


def test_gemma_caps(tmp_path: Path) -> None:
    """Absent is off in gemma3 and 30 in gemma4."""
    assert config_of(family_file("gemma3"), tmp_path).logit_cap == 0.0
    assert config_of(family_file("gemma4"), tmp_path).logit_cap == 30.0
    assert config_of(family_file("gemma4", final_logit_softcapping=0.0), tmp_path).logit_cap == 0.0


def test_gemma4_layers_differ(tmp_path: Path) -> None:
    config = config_of(family_file("gemma4"), tmp_path)
    assert config.head_dims == (HEAD_DIM, FULL_HEAD_DIM) * 2
    assert config.kv_heads == (2, 1) * 2
    assert config.windows == (WINDOW, 0) * 2
    assert [rope.factors for rope in config.ropes] == ["", "rope_freqs.weight"] * 2
    assert config.attention_scales == (1.0,) * LAYERS
    assert config.embedding_scale == math.sqrt(HIDDEN)


def test_gemma4_shared_layers_read_the_last_owners_of_their_kind(tmp_path: Path) -> None:
    config = config_of(make_gemma4_per_layer(family_file("gemma4")), tmp_path)
    assert config.kv_layers == (0, 1, 0, 1)


def test_longrope_divisors_depend_on_the_reach(tmp_path: Path) -> None:
    file = family_file("llama")
    file.keys.update({"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32})
    for reach in ("short", "long"):
        file.add(f"rope_factors_{reach}.weight", HEAD_DIM // 2)
    rope = config_of(file, tmp_path).ropes[0]
    assert rope.factors_for(32) == "rope_factors_short.weight"
    assert rope.factors_for(33) == "rope_factors_long.weight"


def changed(file: FamilyFile, change: dict[str, Any]) -> FamilyFile:
    """``file`` with keys set, or removed where the value is None."""
    for key, value in change.items():
        file.keys.pop(key, None)
        if value is not None:
            file.keys[key] = value
    return file


QWEN3MOE, QWEN35, NEXT, GEMMA3, GEMMA4 = "qwen3moe", "qwen35", "qwen3next", "gemma3", "gemma4"
SECTIONS = "rope.dimension_sections"
WINDOW_KEY, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
SHARED = "attention.shared_kv_layers"


@pytest.mark.parametrize(
    ("architecture", "key", "value", "says"),
    [
        (QWEN3MOE, "expert_count", None, "is 2 (layer 0), must be 0"),
        (QWEN3MOE, "expert_count", 1 << 20, "is 1048576, must be 0 to 65536"),
        (QWEN3MOE, "expert_used_count", None, "is 0 (layer 0), must be 1 to the 6 of"),
        (QWEN3MOE, "expert_used_count", 7, "is 7 (layer 0), must be 1 to the 6 of"),
        (QWEN3MOE, "expert_used_count", [2, 2, 0, 2], "is 0 (layer 2), must be 1 to the 6 of"),
        (QWEN3MOE, "expert_used_count", [2, 2], "has 2 uint32 entries for 4 layers"),
        (QWEN3MOE, "expert_feed_forward_length", [1, 2], "has 2 uint32 entries for 4 layers"),
        (QWEN35, "ssm.conv_kernel", None, "is missing"),
        (QWEN35, "ssm.conv_kernel", 1, "is 1, must be 2 to"),
        (QWEN35, "ssm.state_size", 0, "is 0, must be 1 to"),
        (QWEN35, "ssm.time_step_rank", None, "is missing"),
        (QWEN35, "ssm.group_count", 3, "is 3, must divide qwen35.ssm.time_step_rank (4)"),
        (QWEN35, "ssm.group_count", 0, "is 0, must be 1 to"),
        (QWEN35, "ssm.inner_size", 63, "is 63, must be 64: qwen35.ssm.state_size (16) times"),
        (QWEN35, "full_attention_interval", 0, "is 0, must be 1 to"),
        (QWEN35, "attention.recurrent_layers", [True] * 3, "has 3 bool entries, must be 4 times"),
        (QWEN35, "attention.recurrent_layers", [0, 1, 2, 0], "must be 4 times yes or no"),
        (QWEN35, SECTIONS, None, "is missing"),
        (QWEN35, SECTIONS, [11, 11, 10], "has 3 uint32 entries, must be 4 integers"),
        (QWEN35, SECTIONS, [0.5, 1.0, 1.0, 1.0], "has 4 float32 entries, must be 4 integers"),
        (QWEN35, SECTIONS, [0, 0, 0, 0], "is [0, 0, 0, 0], must be counts of pairs"),
        (QWEN35, SECTIONS, [-1, 11, 11, 0], "is [-1, 11, 11, 0], must be counts of pairs"),
        (QWEN35, SECTIONS, [1, 1, 1, 8], "leaves pair 3 of 4 to the fourth stream"),
        (QWEN35, "feed_forward_length", None, "is 0 or missing (layer 0)"),
        (NEXT, "ssm.inner_size", None, "is missing"),
        (NEXT, "expert_count", None, "must be 0"),
        (GEMMA3, WINDOW_KEY, np.array(-1, np.int32), "is -1, must be 0 to"),
        (GEMMA3, PATTERN, 0, "is 0, must be 1 to"),
        (GEMMA3, PATTERN, [True, False], "has 2 bool entries, must be 4 times yes or no"),
        (GEMMA3, "rope.freq_base_swa", 0.0, "is 0.0, must be a positive number"),
        (GEMMA3, "final_logit_softcapping", -1.0, "is -1.0, must be a positive number"),
        (GEMMA4, WINDOW_KEY, None, "is missing"),
        (GEMMA4, WINDOW_KEY, 0, "is 0, must be 1 to"),
        (GEMMA4, PATTERN, None, "is missing"),
        (GEMMA4, PATTERN, [True] * 5, "has 5 bool entries, must be 4 times yes or no"),
        (GEMMA4, "attention.key_length_swa", None, "is missing"),
        (GEMMA4, "attention.value_length_swa", 8, "is 8, the key's is 16"),
        (GEMMA4, "rope.dimension_count_swa", 32, "is 32, must be even and at most 16"),
        (GEMMA4, "attention.head_count_kv", [2, 1, 3, 1], "3 does not divide 4 heads (layer 2)"),
        (GEMMA4, "embedding_length_per_layer_input", None, "is missing"),
        (GEMMA4, SHARED, 4, "is 4, must be 0 to 3"),
        (GEMMA4, SHARED, 3, "is 3: layer 1 would read layer 0, which is not a full-attention"),
        (GEMMA4, SHARED, 1, "is 1: layer 3 would read layer 2, which is not a full-attention"),
    ],
)
def test_bad_metadata_names_its_key(
    architecture: str, key: str, value: Any, says: str, tmp_path: Path
) -> None:
    if isinstance(value, np.ndarray):
        value = Typed(GgufType.INT32, int(value))
    file = changed(family_file(architecture), {key: value})
    with pytest.raises(ModelFileError, match=re.escape(says)) as raised:
        config_of(file, tmp_path)
    shown = "expert_used_count" if key == "expert_count" and value is None else key
    assert f"{architecture}.{shown}" in str(raised.value)


def no_widths(file: FamilyFile) -> FamilyFile:
    return changed(file, {"expert_feed_forward_length": None, "feed_forward_length": 111})


@pytest.mark.parametrize(("make", "key", "says"), [
    (lambda: no_widths(family_file("qwen3moe")), "expert_feed_forward_length",
     "qwen3moe.feed_forward_length (111) is no multiple of the 2 experts used (layer 0)"),
    (lambda: changed(family_file("qwen3moe"), {"expert_count": None, "expert_used_count": None}),
     "expert_count", "is 0 or missing, must be 1 to"),
    (lambda: changed(make_gemma4_moe(family_file("gemma4")), {"expert_feed_forward_length": None}),
     "expert_feed_forward_length", "is 0 or missing, must be 1 to"),
    (lambda: family_file("gemma4", attention__shared_kv_layers=2,
                         attention__head_count_kv=[2, 1, 2, 2]),
     "attention.head_count_kv", "is 2 in layer 3, which reads the keys of layer 1 with 1"),
])  # fmt: skip
def test_keys_that_contradict_each_other(
    make: Callable[[], FamilyFile], key: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=re.escape(says)) as raised:
        config_of(make(), tmp_path)
    assert f".{key}" in str(raised.value)


def test_other_families_have_no_longrope(tmp_path: Path) -> None:
    file = family_file("qwen2", rope__scaling__type="longrope")
    with pytest.raises(UnsupportedModel, match="is 'longrope'; supported are none, linear, yarn"):
        config_of(file, tmp_path)
