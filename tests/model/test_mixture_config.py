"""Keys of Ling 2, K-EXAONE and Trinity: groups, shared experts, layers with windows; refusals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from tests.model.family_file import HIDDEN, config_of
from tests.model.family_files import family_file
from tests.model.family_parts import EXPERT_WIDTH, EXPERTS, HEAD_DIM, LAYERS, SHARED_WIDTH, WINDOW
from tests.model.test_dense_config import with_keys
from tests.model.test_family_graphs import graph_of

ROUTED = ("bailingmoe2", "exaone-moe", "afmoe")
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize("family", ROUTED)
def test_experts_are_chosen_by_a_bias_behind_dense_layers(tmp_path: Path, family: str) -> None:
    file = with_keys(family, {"expert_weights_scale": 2.5, "expert_weights_norm": False})
    mixture = config_of(file, tmp_path).experts
    assert mixture is not None
    assert (mixture.choice_bias, mixture.shared_gate, mixture.leading_dense) == (True, False, 1)
    assert (mixture.weight_scale, mixture.renormalize) == (2.5, False)


def test_a_softmax_weights_ernies_experts(tmp_path: Path) -> None:
    """With a bias or without one."""
    file = family_file("ernie4_5-moe")
    mixture = config_of(file, tmp_path).experts
    assert mixture is not None
    assert (mixture.choice_bias, mixture.softmax, mixture.leading_dense) == (True, True, 1)
    assert (mixture.shared_width, mixture.shared_gate) == (SHARED_WIDTH, False)
    for layer in range(1, LAYERS):
        del file.values[f"blk.{layer}.exp_probs_b.bias"]
    mixture = config_of(file, tmp_path).experts
    assert mixture is not None
    assert (mixture.choice_bias, mixture.softmax) == (False, False)
    graph_of(file, tmp_path)


@pytest.mark.parametrize(
    ("family", "keys", "width"),
    [
        ("bailingmoe2", {"expert_shared_count": 2}, 2 * EXPERT_WIDTH),
        ("bailingmoe2", {"expert_shared_feed_forward_length": 24, "expert_shared_count": 2}, 48),
        ("exaone-moe", {"expert_shared_feed_forward_length": 24}, 24),
        ("exaone-moe", {}, EXPERT_WIDTH),
        ("afmoe", {"expert_shared_count": 2}, 2 * EXPERT_WIDTH),
    ],
)
def test_shared_experts_are_one(
    tmp_path: Path, family: str, keys: dict[str, Any], width: int
) -> None:
    mixture = config_of(with_keys(family, keys), tmp_path).experts
    assert mixture is not None
    assert mixture.shared_width == width


def test_a_part_of_lings_heads_rotates(tmp_path: Path) -> None:
    config = config_of(family_file("bailingmoe2"), tmp_path)
    assert config.ropes[0].dims == HEAD_DIM // 2
    assert config.experts is not None
    assert (config.experts.groups, config.experts.groups_used) == (2, 1)


@pytest.mark.parametrize("family", ["exaone-moe", "afmoe"])
def test_layers_with_a_window_rotate_alone(tmp_path: Path, family: str) -> None:
    config = config_of(family_file(family), tmp_path)
    assert config.windows == (WINDOW,) * 3 + (0,)
    assert [rope.rotates for rope in config.ropes] == [True] * 3 + [False]
    assert config.embedding_scale == (math.sqrt(HIDDEN) if family == "afmoe" else 1.0)


@pytest.mark.parametrize("entries", [LAYERS, LAYERS + 1])
def test_a_list_of_windows_may_leave_draft_blocks_out(tmp_path: Path, entries: int) -> None:
    listed = [layer % 2 == 0 for layer in range(entries)]
    keys = {"nextn_predict_layers": 1, "block_count": LAYERS + 1, PATTERN: listed}
    config = config_of(with_keys("exaone-moe", keys), tmp_path)
    assert config.windows == tuple(WINDOW * slides for slides in listed[:LAYERS])


@pytest.mark.parametrize(
    ("family", "key", "value", "error"),
    [
        *((family, "expert_gating_func", 4, UnsupportedModel) for family in ROUTED),
        *((family, "expert_count", 0, ModelFileError) for family in ROUTED),
        ("ernie4_5-moe", "expert_gating_func", 2, UnsupportedModel),
        ("ernie4_5-moe", "interleave_moe_layer_step", 2, UnsupportedModel),
        ("ernie4_5-moe", "interleave_moe_layer_step", None, ModelFileError),
        ("ernie4_5-moe", "expert_weights_norm", False, UnsupportedModel),
        ("ernie4_5-moe", "expert_weights_scale", 2.5, UnsupportedModel),
        ("bailingmoe2", "expert_gating_func", None, ModelFileError),
        ("bailingmoe2", GROUPS, EXPERTS - 2, ModelFileError),
        ("bailingmoe2", GROUPS, EXPERTS, ModelFileError),
        ("bailingmoe2", GROUPS_USED, 3, ModelFileError),
        ("bailingmoe2", "attention.sliding_window", 8, UnsupportedModel),
        ("exaone-moe", "attention.sliding_window", None, ModelFileError),
        ("exaone-moe", "rope.freq_base_swa", 5e5, UnsupportedModel),
        ("exaone-moe", PATTERN, [True] * (LAYERS - 1), ModelFileError),
        ("afmoe", "attention.sliding_window", None, ModelFileError),
        ("afmoe", "attention.key_length_swa", 8, UnsupportedModel),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(
    tmp_path: Path, family: str, key: str, value: Any, error: type[Exception]
) -> None:
    file = with_keys(
        family, {key: value, **({"expert_used_count": 0} if key == "expert_count" else {})}
    )
    if value is None:
        del file.keys[key]
    with pytest.raises(error, match=rf"{family}\.{re.escape(key)}"):
        config_of(file, tmp_path)


@pytest.mark.parametrize("used", [3, [2, 2, 2, 3]], ids=["all layers", "one layer"])
def test_more_experts_than_the_groups_have_are_refused(tmp_path: Path, used: object) -> None:
    keys = {GROUPS: 3, GROUPS_USED: 1, "expert_used_count": used}
    with pytest.raises(ModelFileError, match=rf"{GROUPS_USED}.*is 1, groups of 2 for 3 experts"):
        config_of(with_keys("bailingmoe2", keys), tmp_path)
