"""Keys of LFM 2 with experts: which layers have some, and how they are weighted."""

from __future__ import annotations

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


def test_the_way_to_weight_experts_must_be_named(tmp_path: Path) -> None:
    file = with_keys("lfm2moe", {})
    del file.keys["expert_gating_func"]
    with pytest.raises(ModelFileError, match=r"lfm2moe\.expert_gating_func': is missing"):
        config_of(file, tmp_path)
