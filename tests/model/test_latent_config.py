"""Keys of deepseek2: sizes of latent rows, what YaRN does to scores, experts; refusals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.config import ModelConfig
from tests.model.family_file import FamilyFile, config_of
from tests.model.family_parts import EXPERT_WIDTH, HEADS
from tests.model.latent_layers import QUERY_RANK, RANK, ROTATED, UNROTATED, VALUE
from tests.model.test_dense_config import with_keys

SIZE = UNROTATED + ROTATED


def config(keys: dict[str, Any], folder: Path) -> ModelConfig:
    return config_of(with_keys("deepseek2", keys), folder)


def test_a_row_is_one_head_of_keys_and_values(tmp_path: Path) -> None:
    found = config({}, tmp_path)
    latent = found.latent
    assert latent is not None
    assert (latent.rank, latent.query_rank) == (RANK, QUERY_RANK)
    assert (latent.unrotated, latent.value) == (UNROTATED, VALUE)
    assert set(found.head_dims) == {RANK + ROTATED}
    assert set(found.kv_heads) == {1}
    assert found.ropes[0].dims == ROTATED
    assert not found.ropes[0].neox
    assert found.attention_scales[0] == 1 / math.sqrt(SIZE)


YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("multiplier", "grown", "turned"),
    [(0.1, 1 + 0.1 * math.log(40), 1.0), (0.0, 1.0, 1 + 0.1 * math.log(40))],
)
def test_yarn_grows_scores_by_its_multiplier(
    multiplier: float, grown: float, turned: float, tmp_path: Path
) -> None:
    """Rotated channels grow only in a file without one."""
    keys = YARN | ({"rope.scaling.yarn_log_multiplier": multiplier} if multiplier else {})
    found = config(keys, tmp_path)
    expected = (turned * grown) ** 2 / math.sqrt(SIZE)
    assert found.attention_scales[0] == pytest.approx(expected, rel=1e-6)
    assert found.ropes[0].scaling.log_multiplier == (1.0 if multiplier else 0.0)


def test_experts_of_version_3_and_of_version_2(tmp_path: Path) -> None:
    keys = {"expert_group_count": 3, "expert_group_used_count": 2, "expert_weights_scale": 2.5}
    mixture = config(keys, tmp_path).experts
    assert mixture is not None
    assert (mixture.choice_bias, mixture.renormalize, mixture.weight_scale) == (True, True, 2.5)
    assert (mixture.groups, mixture.groups_used, mixture.leading_dense) == (3, 2, 1)
    assert (mixture.shared_width, mixture.shared_gate) == (EXPERT_WIDTH, False)
    keys = {"expert_gating_func": 1, "expert_weights_norm": False, "expert_shared_count": 2}
    mixture = config(keys, tmp_path).experts
    assert mixture is not None
    assert (mixture.choice_bias, mixture.renormalize) == (False, False)
    assert mixture.shared_width == 2 * EXPERT_WIDTH


@pytest.mark.parametrize("biased", [False, True])
def test_a_bias_tells_where_the_file_does_not(biased: bool, tmp_path: Path) -> None:
    file = with_keys("deepseek2", {})
    del file.keys["expert_gating_func"]
    if not biased:
        del file.values["blk.1.exp_probs_b.bias"]
    mixture = config_of(file, tmp_path).experts
    assert mixture is not None
    assert mixture.choice_bias == biased


REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "expert_gating_func": (4, UnsupportedModel),
    "attention.temperature_scale": (0.1, UnsupportedModel),
    "rope.scaling.type": ("longrope", UnsupportedModel),
    "attention.kv_lora_rank": (RANK + 1, ModelFileError),
    "attention.value_length": (RANK + 1, ModelFileError),
    "attention.key_length_mla": (ROTATED, ModelFileError),
    "attention.head_count_kv": (4, ModelFileError),
    "expert_group_used_count": (7, ModelFileError),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_the_model_is_refused_by_name(key: str, tmp_path: Path) -> None:
    value, error = REFUSED[key]
    with pytest.raises(error, match=r"deepseek2\."):
        config({key: value}, tmp_path)


def test_groups_are_of_experts_with_a_sigmoid(tmp_path: Path) -> None:
    keys = {"expert_group_count": 3, "expert_group_used_count": 2, "expert_gating_func": 1}
    with pytest.raises(UnsupportedModel, match=re.escape("expert_group_count: is 3, with a soft")):
        config(keys, tmp_path)


OLDER: dict[str, Any] = {
    "attention.head_count_kv": HEADS,
    "attention.key_length": SIZE,
    "attention.value_length": VALUE,
}
"""What files have that were converted before latent rows."""


def older(keys: dict[str, Any]) -> FamilyFile:
    file = with_keys("deepseek2", {**OLDER, **keys})
    for name in ("key", "value"):
        del file.keys[f"attention.{name}_length_mla"]
    return file


def test_an_older_file_is_read_as_a_new_one(tmp_path: Path) -> None:
    assert config_of(older({}), tmp_path) == config({}, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", 2),
        ("attention.key_length", ROTATED),
        ("attention.kv_lora_rank", 0),
    ],
)
def test_sizes_of_an_older_file_that_contradict_each_other(
    key: str, value: int, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=key):
        config_of(older({key: value}), tmp_path)


@pytest.mark.parametrize(("multiplier", "read"), [(0.1, True), (0.0, True), (0.0707, False)])
def test_the_multiplier_of_mistral_4(multiplier: float, read: bool, tmp_path: Path) -> None:
    """Of another one its files do not say how rotated channels grow."""
    file = with_keys("mistral4", {"rope.scaling.yarn_log_multiplier": multiplier})
    if read:
        assert config_of(file, tmp_path).latent is not None
        return
    with pytest.raises(UnsupportedModel, match=r"mistral4\.rope\.scaling\.yarn_log_multiplier"):
        config_of(file, tmp_path)
