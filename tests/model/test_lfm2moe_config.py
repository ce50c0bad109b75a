"""Keys of LFM 2 and GLM-4.5 with experts: which layers have some, how they are weighted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from tests.model.family_file import config_of
from tests.model.family_files import EXPERT_WIDTH, LAYERS
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


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_the_model_is_refused_by_name(key: str, tmp_path: Path) -> None:
    keys, error = REFUSED[key]
    with pytest.raises(error, match=rf"lfm2moe\.{key}"):
        config_of(with_keys("lfm2moe", keys), tmp_path)


def test_shared_experts_of_glm_are_one_and_weights_have_a_factor(tmp_path: Path) -> None:
    keys = {"expert_shared_count": 2, "expert_weights_scale": 2.5}
    mixture = config_of(with_keys("glm4moe", keys), tmp_path).experts
    assert mixture is not None
    assert (mixture.shared_width, mixture.shared_gate) == (2 * EXPERT_WIDTH, False)
    assert (mixture.leading_dense, mixture.choice_bias, mixture.weight_scale) == (1, True, 2.5)


REFUSED_OF_GLM = {
    "expert_gating_func": {"expert_gating_func": 1},
    "expert_weights_norm": {"expert_weights_norm": False},
    "expert_group_count": {"expert_group_count": 2},
    "rope.dimension_sections": {"rope.dimension_sections": [2, 3, 3, 0]},
}


@pytest.mark.parametrize("key", REFUSED_OF_GLM)
def test_what_glm_does_not_compute_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"glm4moe\.{re.escape(key)}"):
        config_of(with_keys("glm4moe", REFUSED_OF_GLM[key]), tmp_path)


def test_the_way_to_weight_experts_must_be_named(tmp_path: Path) -> None:
    file = with_keys("lfm2moe", {})
    del file.keys["expert_gating_func"]
    with pytest.raises(ModelFileError, match=r"lfm2moe\.expert_gating_func': is missing"):
        config_of(file, tmp_path)
