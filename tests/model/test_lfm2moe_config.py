"""Keys of families with experts: which layers have some, how they are weighted; refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from tests.model.family_file import config_of
from tests.model.family_parts import EXPERT_WIDTH, LAYERS
from tests.model.test_dense_config import with_keys


def test_the_first_layers_are_dense(tmp_path: Path) -> None:
    mixture = config_of(with_keys("lfm2moe", {}), tmp_path).experts
    assert mixture is not None
    assert (mixture.leading_dense, mixture.choice_bias) == (1, True)
    assert mixture.widths == (EXPERT_WIDTH,) * LAYERS


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "expert_gating_func": ({"expert_gating_func": 1}, UnsupportedModel),
    "expert_weights_norm": ({"expert_weights_norm": False}, UnsupportedModel),
    "expert_weights_scale": ({"expert_weights_scale": 2.5}, UnsupportedModel),
    "leading_dense_block_count": ({"leading_dense_block_count": LAYERS + 1}, ModelFileError),
    "expert_count": ({"expert_count": 0, "expert_used_count": 0}, ModelFileError),
}


@pytest.mark.parametrize("family", ["lfm2moe", "minimax-m2"])
@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_the_model_is_refused_by_name(
    key: str, family: str, tmp_path: Path
) -> None:
    keys, error = REFUSED[key]
    with pytest.raises(error, match=rf"{family}\.{key}"):
        config_of(with_keys(family, keys), tmp_path)


def test_shared_experts_of_glm_are_one_and_weights_have_a_factor(tmp_path: Path) -> None:
    keys = {"expert_shared_count": 2, "expert_weights_scale": 2.5}
    mixture = config_of(with_keys("glm4moe", keys), tmp_path).experts
    assert mixture is not None
    assert (mixture.shared_width, mixture.shared_gate) == (2 * EXPERT_WIDTH, False)
    assert (mixture.leading_dense, mixture.choice_bias, mixture.weight_scale) == (1, True, 2.5)


@pytest.mark.parametrize("family", ["qwen2moe", "olmoe"])
def test_weights_are_divided_by_their_sum_where_the_file_says_so(
    family: str, tmp_path: Path
) -> None:
    for number, (keys, renormalize) in enumerate(
        (({}, False), ({"expert_weights_norm": True}, True))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        mixture = config_of(with_keys(family, keys), folder).experts
        assert mixture is not None
        assert mixture.renormalize is renormalize


NOT_COMPUTED = [
    ("glm4moe", "expert_gating_func", 1),
    ("glm4moe", "expert_weights_norm", False),
    ("glm4moe", "expert_group_count", 2),
    ("glm4moe", "rope.dimension_sections", [2, 3, 3, 0]),
    ("granitemoe", "expert_gating_func", 2),
    ("qwen2moe", "expert_gating_func", 2),
    ("olmoe", "expert_weights_scale", 2.5),
    ("olmoe", "attention.clamp_kqv", 8.0),
    ("nemotron_h", "rope.scaling.attn_factor", 1.5),
    ("nemotron_h_moe", "moe_latent_size", 16),
    ("nemotron_h_moe", "expert_group_count", 2),
    ("nemotron_h_moe", "leading_dense_block_count", 1),
    ("granitemoe", "attention.sliding_window", 8),
    ("minimax-m2", "expert_group_count", 2),
    ("ernie4_5", "rope.dimension_sections", [2, 3, 3, 0]),
    ("exaone4", "attention.scale", 0.5),
    ("seed_oss", "attention.sliding_window", 8),
]


@pytest.mark.parametrize(("family", "key", "value"), NOT_COMPUTED)
def test_what_a_family_does_not_compute_is_refused_by_name(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{family}\.{re.escape(key)}"):
        config_of(with_keys(family, {key: value}), tmp_path)


@pytest.mark.parametrize("family", ["lfm2moe", "minimax-m2"])
def test_the_way_to_weight_experts_must_be_named(family: str, tmp_path: Path) -> None:
    file = with_keys(family, {})
    del file.keys["expert_gating_func"]
    with pytest.raises(ModelFileError, match=rf"{family}\.expert_gating_func': is missing"):
        config_of(file, tmp_path)
