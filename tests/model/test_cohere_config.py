"""Keys of Command R and Command R7B: norms, windows, rotation, the factor of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from tests.model.family_file import config_of
from tests.model.family_parts import LAYER_NORM, LAYERS, WINDOW
from tests.model.test_dense_config import with_keys


def test_every_fourth_layer_sees_all_and_does_not_rotate(tmp_path: Path) -> None:
    config = config_of(with_keys("cohere2", {}), tmp_path)
    assert config.windows == (WINDOW, WINDOW, WINDOW, 0)
    assert [rope.rotates for rope in config.ropes] == [True, True, True, False]
    assert not any(rope.neox for rope in config.ropes)
    listed = {"attention.sliding_window_pattern": [False, True, True, False]}
    assert config_of(with_keys("cohere2", listed), tmp_path).windows == (0, WINDOW, WINDOW, 0)


def test_command_r_attends_and_rotates_everywhere(tmp_path: Path) -> None:
    config = config_of(with_keys("command-r", {"logit_scale": 0.0625}), tmp_path)
    assert config.windows == (0,) * LAYERS
    assert all(rope.rotates for rope in config.ropes)
    assert config.logit_scale == 0.0625


def test_logits_without_a_factor(tmp_path: Path) -> None:
    assert config_of(with_keys("cohere2", {"logit_scale": 0.0}), tmp_path).logit_scale == 1.0


BROKEN: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "rope.freq_base_swa": ({"rope.freq_base_swa": 5.0}, UnsupportedModel),
    "attention.sliding_window": ({"attention.sliding_window": 0}, ModelFileError),
    "attention.scale": ({"attention.scale": 0.5}, UnsupportedModel),
    LAYER_NORM: ({LAYER_NORM: -1.0}, ModelFileError),
}


@pytest.mark.parametrize("key", BROKEN)
def test_what_would_change_the_model_is_refused_by_name(key: str, tmp_path: Path) -> None:
    keys, error = BROKEN[key]
    with pytest.raises(error, match=key.replace(".", r"\.")):
        config_of(with_keys("cohere2", keys), tmp_path)


@pytest.mark.parametrize("key", [LAYER_NORM, "logit_scale"])
@pytest.mark.parametrize("architecture", ["command-r", "cohere2"])
def test_keys_it_cannot_do_without(architecture: str, key: str, tmp_path: Path) -> None:
    file = with_keys(architecture, {})
    del file.keys[key]
    with pytest.raises(ModelFileError, match=rf"{architecture}\.{key}': is missing"):
        config_of(file, tmp_path)
