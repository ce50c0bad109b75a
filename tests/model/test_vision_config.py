"""The language models of Qwen VL are Qwen's for text, whatever their files say of images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.config.vision import SEEING
from tests.model.family_file import config_of
from tests.model.family_files import family_file
from tests.model.family_parts import HEAD_DIM
from tests.model.test_dense_config import with_keys
from tests.model.test_family_graphs import graph_of

SECTIONS = "rope.dimension_sections"
PLAIN = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
PAIRS = HEAD_DIM // 2


@pytest.mark.parametrize("seeing", SEEING)
def test_a_graph_for_text_is_that_of_the_plain_family(tmp_path: Path, seeing: str) -> None:
    graphs = [graph_of(family_file(name), tmp_path) for name in (seeing, PLAIN[seeing])]
    assert graphs[0].nodes == graphs[1].nodes
    assert graphs[0].buffers == graphs[1].buffers


@pytest.mark.parametrize("sections", [[PAIRS, 0, 0, 0], [PAIRS - 2, 1, 1, 0], [16, 24, 24, 0]])
@pytest.mark.parametrize("seeing", SEEING)
def test_sections_of_equal_positions_are_plain_rotation(
    tmp_path: Path, seeing: str, sections: list[int]
) -> None:
    rope = config_of(with_keys(seeing, {SECTIONS: sections}), tmp_path).ropes[0]
    assert (rope.neox, rope.dims, rope.rotates, rope.factors) == (True, HEAD_DIM, True, "")


def test_layers_that_images_enter_mean_nothing_for_text(tmp_path: Path) -> None:
    configs = [
        config_of(with_keys("qwen3vl", {"n_deepstack_layers": count}), tmp_path)
        for count in (0, 3, 4)
    ]
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize(
    ("key", "value", "error", "says"),
    [
        (SECTIONS, [PAIRS - 3, 1, 1, 1], UnsupportedModel, "a fourth stream"),
        (SECTIONS, [PAIRS + 1, 0, -1, 0], ModelFileError, "must be counts of pairs"),
        (SECTIONS, None, ModelFileError, "is missing"),
        ("n_deepstack_layers", -1, ModelFileError, "is -1"),
        ("rope.scaling.type", "longrope", UnsupportedModel, "'longrope'"),
    ],
)
@pytest.mark.parametrize("seeing", SEEING)
def test_what_no_text_of_the_family_has_is_refused_by_name(
    tmp_path: Path, seeing: str, key: str, value: Any, error: type[Exception], says: str
) -> None:
    file = with_keys(seeing, {key: value})
    if value is None:
        del file.keys[key]
    with pytest.raises(error, match=re.escape(says)) as raised:
        config_of(file, tmp_path)
    assert f"{seeing}.{key}" in str(raised.value)
