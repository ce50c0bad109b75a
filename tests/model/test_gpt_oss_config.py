"""Keys of gpt-oss: windows, how experts are weighted, the rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from tests.model.family_file import config_of
from tests.model.family_parts import EXPERT_WIDTH, EXPERTS, LAYERS, USED, WINDOW
from tests.model.test_dense_config import YARN, with_keys


def test_every_second_layer_has_a_window(tmp_path: Path) -> None:
    config = config_of(with_keys("gpt-oss", {}), tmp_path)
    assert config.windows == (WINDOW, 0) * (LAYERS // 2)
    assert config.experts is not None
    assert (config.experts.count, config.experts.used) == (EXPERTS, (USED,) * LAYERS)
    assert config.experts.widths == (EXPERT_WIDTH,) * LAYERS
    listed = {"attention.sliding_window_pattern": [False, True, True, False]}
    assert config_of(with_keys("gpt-oss", listed), tmp_path).windows == (0, WINDOW, WINDOW, 0)


def test_yarn_and_its_betas_turn_all_layers(tmp_path: Path) -> None:
    betas = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    ropes = config_of(with_keys("gpt-oss", {**YARN, **betas}), tmp_path).ropes
    assert len(set(ropes)) == 1
    assert ropes[0].neox
    assert (ropes[0].scaling.beta_fast, ropes[0].scaling.beta_slow) == (16.0, 2.0)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "expert_gating_func": ({"expert_gating_func": 2}, UnsupportedModel),
    "rope.freq_base_swa": ({"rope.freq_base_swa": 5.0}, UnsupportedModel),
    "attention.sliding_window": ({"attention.sliding_window": 0}, ModelFileError),
    "expert_count": ({"expert_count": 0, "expert_used_count": 0}, ModelFileError),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_the_model_is_refused_by_name(key: str, tmp_path: Path) -> None:
    keys, error = REFUSED[key]
    with pytest.raises(error, match=key.replace(".", r"\.")):
        config_of(with_keys("gpt-oss", keys), tmp_path)


def test_its_own_way_to_weight_experts_is_taken(tmp_path: Path) -> None:
    assert config_of(with_keys("gpt-oss", {"expert_gating_func": 3}), tmp_path).experts is not None
