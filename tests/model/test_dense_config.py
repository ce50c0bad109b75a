"""Keys of dense families beyond Llama's, and keys that no reader of a family knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.exact.rotary import RotaryScaling, growth_table, rotary_table, unrotated_table
from reference.model.config.records import QueryGrowth
from reference.model.config.unread import CHANGING
from tests.model.family_file import FamilyFile, config_of
from tests.model.family_files import family_file
from tests.model.family_parts import HEAD_DIM, LAYERS

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


def with_keys(architecture: str, keys: dict[str, Any]) -> FamilyFile:
    file = family_file(architecture)
    file.keys.update(keys)
    return file


def test_every_fourth_layer_of_smollm3_does_not_rotate(tmp_path: Path) -> None:
    file = family_file("smollm3")
    ropes = config_of(file, tmp_path).ropes
    assert [rope.rotates for rope in ropes] == [True, True, True, False]
    assert ropes[3].table != ropes[0].table
    assert ropes[3].dims == ropes[0].dims


def test_an_unrotated_table_keeps_every_value() -> None:
    """x cos 0 - y sin 0 is x for every finite x and y."""
    table = unrotated_table(3, 8)
    assert table.shape == rotary_table(3, 1e4, 8).shape
    x, y = np.float32([1.5, -2e30]), np.float32([-3e38, 1e-40])
    assert (x * table[2, 0, 0] - y * table[2, 1, 0] == x).all()


def test_queries_of_ministral_grow_with_every_original_context(tmp_path: Path) -> None:
    keys = {**YARN, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.25}
    config = config_of(with_keys("mistral3", keys), tmp_path)
    assert config.query_growth == QueryGrowth(64, 0.25)
    table = growth_table(200, 64, 0.25)
    assert table.shape == (200, 2, 1)
    expected = 1 + 0.25 * np.log(1 + np.arange(200) // 64)
    assert (table[:, 0, 0] == expected.astype(np.float32)).all()
    assert not table[:, 1].any()
    assert config_of(family_file("mistral3"), tmp_path).query_growth is None


def test_yarn_of_ministral_leaves_sizes_alone(tmp_path: Path) -> None:
    """The files' multiplier is 1; without it, sine and cosine grow as in other families."""
    scalings = [
        config_of(with_keys("mistral3", {**YARN, **more}), tmp_path).ropes[0].scaling
        for more in ({"rope.scaling.yarn_log_multiplier": 1.0}, {})
    ]
    alone, grown = (rotary_table(1, 1e4, HEAD_DIM, scaling)[0, 0, 0] for scaling in scalings)
    assert alone == 1.0
    assert grown == np.float32(1 + 0.1 * np.log(4.0))


def test_another_length_of_growth_is_refused(tmp_path: Path) -> None:
    file = with_keys("mistral3", {**YARN, "attention.temperature_length": 32})
    with pytest.raises(UnsupportedModel, match=r"temperature_length: is 32; supported is 64"):
        config_of(file, tmp_path)


def test_granite_without_rotation(tmp_path: Path) -> None:
    config = config_of(with_keys("granite", {"rope.scaling.finetuned": False}), tmp_path)
    assert not any(rope.rotates for rope in config.ropes)


def test_granite_has_four_factors(tmp_path: Path) -> None:
    config = config_of(with_keys("granite", {"attention.scale": 0.25}), tmp_path)
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (3.0, 0.5, 0.25)
    assert config.attention_scales == (0.25,) * LAYERS
    with pytest.raises(ModelFileError, match=r"granite\.logit_scale"):
        config_of(with_keys("granite", {"logit_scale": 0.0}), tmp_path)


def test_phi_has_one_window_for_all_layers(tmp_path: Path) -> None:
    assert config_of(family_file("phi3"), tmp_path).windows == (0,) * LAYERS
    config = config_of(with_keys("phi3", {"attention.sliding_window": 7}), tmp_path)
    assert config.windows == (7,) * LAYERS


def test_phi_divisors_depend_on_the_context(tmp_path: Path) -> None:
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    file = with_keys("phi3", keys)
    for reach in ("short", "long"):
        file.add(f"rope_factors_{reach}.weight", HEAD_DIM // 2)
    rope = config_of(file, tmp_path).ropes[0]
    assert rope.factors_for(32) == "rope_factors_short.weight"
    assert rope.factors_for(33) == "rope_factors_long.weight"
    assert rope.scaling.attention_factor == 1.25
    assert rope.neox


def test_olmo3_scales_the_angles_of_full_layers_only(tmp_path: Path) -> None:
    config = config_of(with_keys("olmo2", {"attention.sliding_window": 9, **YARN}), tmp_path)
    assert config.windows == (9, 9, 9, 0)
    assert [rope.scaling.yarn for rope in config.ropes] == [False, False, False, True]
    listed = {"attention.sliding_window_pattern": [False, True, True, False]}
    config = config_of(with_keys("olmo2", {"attention.sliding_window": 9, **listed}), tmp_path)
    assert config.windows == (0, 9, 9, 0)


def test_glm4_with_pictures_is_refused(tmp_path: Path) -> None:
    file = with_keys("glm4", {"rope.dimension_sections": [8, 12, 12, 0]})
    with pytest.raises(UnsupportedModel, match="only GLM-4 for text"):
        config_of(file, tmp_path)


def test_yarn_reads_its_betas(tmp_path: Path) -> None:
    keys = {"yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0, "attn_factor": 1.5}
    written = {f"rope.scaling.{name}": value for name, value in keys.items()}
    scaling = config_of(with_keys("qwen3", {**YARN, **written}), tmp_path).ropes[0].scaling
    assert scaling == RotaryScaling(4.0, True, 64, 1.5, beta_fast=24.0, beta_slow=2.0)
    plain = config_of(with_keys("qwen3", YARN), tmp_path).ropes[0].scaling
    tables = [rotary_table(64, 1e4, HEAD_DIM, each) for each in (scaling, plain)]
    assert (tables[0] != tables[1]).any()


def test_another_extrapolation_factor_of_yarn_is_refused(tmp_path: Path) -> None:
    file = with_keys("qwen3", {**YARN, "rope.scaling.yarn_ext_factor": 0.5})
    with pytest.raises(UnsupportedModel, match=r"qwen3\.rope\.scaling\.yarn_ext_factor: is 0.5"):
        config_of(file, tmp_path)


def test_an_error_shows_the_beginning_of_a_long_value(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        config_of(with_keys("llama", {"logit_scale": "x" * 100_000}), tmp_path)
    assert 100 < len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["logit_scale", "attention.scale", "expert_weights_scale"])
def test_a_value_without_effect_is_accepted(name: str, tmp_path: Path) -> None:
    config = config_of(with_keys("qwen2", {name: CHANGING[name][-1]}), tmp_path)
    assert config == config_of(family_file("qwen2"), tmp_path)
