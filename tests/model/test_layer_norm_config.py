"""Keys of StarCoder 2, StableLM, Phi 2 and GPT-NeoX: norms, parts of heads that rotate, parallel
blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.limits import Limits
from reference.model.open import open_model
from tests.model.family_file import config_of
from tests.model.family_parts import HEAD_DIM, LAYER_NORM
from tests.model.later_layers import LAYER_NORMED
from tests.model.test_dense_config import with_keys

PARALLEL = "use_parallel_residual"


@pytest.mark.parametrize("architecture", LAYER_NORMED)
def test_halves_of_a_part_rotate(architecture: str, tmp_path: Path) -> None:
    rope = config_of(with_keys(architecture, {}), tmp_path).ropes[0]
    assert rope.neox
    assert rope.dims == (HEAD_DIM if architecture == "starcoder2" else HEAD_DIM // 4)


@pytest.mark.parametrize("architecture", LAYER_NORMED)
def test_the_epsilon_of_layer_norms_is_needed(architecture: str, tmp_path: Path) -> None:
    file = with_keys(architecture, {})
    del file.keys[LAYER_NORM]
    with pytest.raises(ModelFileError, match=rf"{architecture}\.{LAYER_NORM}': is missing"):
        config_of(file, tmp_path)


def test_only_gpt_neox_is_parallel_by_its_key(tmp_path: Path) -> None:
    """Blocks of StableLM are if they lack the second norm."""
    for parallel in (True, False):
        keys = {PARALLEL: parallel}
        assert config_of(with_keys("gptneox", keys), tmp_path).parallel is parallel
        assert not config_of(with_keys("stablelm", keys), tmp_path).parallel
    with pytest.raises(UnsupportedModel, match=PARALLEL):
        config_of(with_keys("phi2", {PARALLEL: True}), tmp_path)


@pytest.mark.parametrize("architecture", LAYER_NORMED)
def test_windows_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"attention\.sliding_window"):
        config_of(with_keys(architecture, {"attention.sliding_window": 9}), tmp_path)


def test_norms_of_heads_are_refused_by_name(tmp_path: Path) -> None:
    """StableLM 2 12B has some that subtract the mean."""
    file = with_keys("stablelm", {})
    file.vector("blk.0.attn_q_norm", HEAD_DIM)
    model = open_model(file.write(tmp_path / "m.gguf"))
    with model.file, pytest.raises(UnsupportedModel, match="attn_q_norm"):
        model.graph(Limits(slots=1, context=16, pages=1))
