"""Keys of families whose norms subtract the mean: parts of heads that rotate, parallel blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.limits import Limits
from reference.model.open import open_model
from tests.model.family_file import config_of
from tests.model.family_files import family_file
from tests.model.family_parts import HEAD_DIM, LAYER_NORM
from tests.model.later_layers import LAYER_NORMED
from tests.model.test_dense_config import with_keys

PARALLEL = "use_parallel_residual"


@pytest.mark.parametrize("architecture", LAYER_NORMED)
def test_halves_of_a_part_rotate(architecture: str, tmp_path: Path) -> None:
    """But for OLMo, where neighbours do."""
    rope = config_of(with_keys(architecture, {}), tmp_path).ropes[0]
    assert rope.neox is (architecture != "olmo")
    parts = {"starcoder2": 1, "falcon": 1, "olmo": 1, "nemotron": 2}
    assert rope.dims == HEAD_DIM // parts.get(architecture, 4)


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


def test_a_norm_of_all_heads_alike_is_refused(tmp_path: Path) -> None:
    """Heads of StableLM 2 12B have weights of their own."""
    file = with_keys("stablelm", {})
    file.vector("blk.0.attn_q_norm", HEAD_DIM)
    model = open_model(file.write(tmp_path / "m.gguf"))
    with model.file, pytest.raises(ModelFileError, match=r"attn_q_norm.*has shape \[16\]"):
        model.graph(Limits(slots=1, context=16, pages=1))


def test_clamped_queries_are_refused_by_name(tmp_path: Path) -> None:
    """OLMo 1.7 has such."""
    with pytest.raises(UnsupportedModel, match=r"attention\.clamp_kqv"):
        config_of(with_keys("olmo", {"attention.clamp_kqv": 8.0}), tmp_path)


def test_baichuan_13b_is_refused(tmp_path: Path) -> None:
    """Its scores fall with the distance, of which its files say nothing."""
    layers = {"block_count": 40, "attention.head_count": 4}
    with pytest.raises(UnsupportedModel, match=r"block_count.*is 40"):
        config_of(family_file("baichuan", **layers), tmp_path)
