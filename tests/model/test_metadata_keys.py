"""Metadata that changes a formula reaches the configuration or is refused by its name."""

from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from contract.ir.nodes import BufferKind
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.config.read import READERS
from reference.model.config.rope import TABLE
from reference.model.config.unread import CHANGING
from reference.model.config.vision import SEEING
from reference.model.gguf.types import GgufType
from reference.model.gguf.writer import Typed
from reference.model.open import open_model
from reference.model.weights import constant_bytes
from tests.model.family_file import config_of, with_keys
from tests.model.metadata_keys import (
    OF_OTHERS,
    SIZES,
    UNUSUAL,
    WINDOWED_ONLY,
    WITHOUT_EFFECT,
    YARN,
    known_keys,
)


def test_every_key_that_can_be_written_is_tried_or_has_a_reason():
    classes = (UNUSUAL, WINDOWED_ONLY, SIZES, WITHOUT_EFFECT, OF_OTHERS)
    assert set(known_keys()) <= {key for names in classes for key in names}
    assert set(CHANGING) <= set(UNUSUAL)


RENORMALIZED = ("qwen2moe", "olmoe", "nemotron_h_moe", "deepseek", "hy_v3")
ALWAYS = {
    "granitehybrid": {"rope.scaling.finetuned": True},
    "gptneox": {"use_parallel_residual": False},
    **{name: {"expert_weights_norm": True} for name in RENORMALIZED},
}
"""Keys with which an architecture rotates or renormalizes that does not by itself."""
BY_TENSORS = {("stablelm", "use_parallel_residual")}
"""Keys of what the tensors of a file say; converters write others."""
OF_IMAGES = {(name, "n_deepstack_layers") for name in SEEING}
"""Keys that matter for images only, which are not read."""
WINDOWED = (
    *("gemma2", "gemma3", "gemma3n", "gemma4", "olmo2", "phi3", "gpt-oss", "cohere2"),
    *("exaone4", "exaone-moe", "afmoe", "llama4", "mellum", "smallthinker"),
)


def read_with(architecture: str, keys: Mapping[str, Any], folder: Path) -> ModelConfig | str:
    """The configuration with these keys, or what refuses them."""
    try:
        return config_of(with_keys(architecture, dict(keys)), folder)
    except (ModelFileError, UnsupportedModel) as refused:
        return str(refused)


def assert_felt(before: ModelConfig | str, after: ModelConfig | str, named: Iterable[str]) -> None:
    """The configuration changed, or one of the keys ``named`` is refused by its name."""
    assert isinstance(before, ModelConfig)
    if isinstance(after, str):
        assert any(f"{before.architecture}.{key}" in after for key in named), after
    else:
        assert after != before, list(named)


@pytest.mark.parametrize("architecture", READERS)
def test_an_unusual_value_is_read_or_refused(architecture, tmp_path):
    always = ALWAYS.get(architecture, {})
    before = read_with(architecture, always, tmp_path)
    for name, keys in UNUSUAL.items():
        if (architecture, name) in OF_IMAGES | BY_TENSORS:
            continue
        assert_felt(before, read_with(architecture, {**always, **keys}, tmp_path), keys)


@pytest.mark.parametrize("key", WINDOWED_ONLY)
@pytest.mark.parametrize("architecture", WINDOWED)
def test_keys_of_windows_are_read_or_refused(architecture, key, tmp_path):
    """A wrong size of one key may show in another of them."""
    value = [True, False, False, True] if "pattern" in key else 8
    window = {"attention.sliding_window": 5}
    before = read_with(architecture, window, tmp_path)
    after = read_with(architecture, {**window, key: value}, tmp_path)
    assert_felt(before, after, WINDOWED_ONLY)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_a_window_of_one_position_is_read(architecture, tmp_path):
    config = read_with(architecture, {"attention.sliding_window": 1}, tmp_path)
    assert isinstance(config, ModelConfig), config
    assert max(map(abs, config.windows)) == 1


HUGE = Typed(GgufType.FLOAT64, 1e300)
ODD_VALUES = (2**64 - 1, -1, 0, 1e-45, float("nan"), HUGE, "", True, [1, 2], [0.5] * 20, ["a"])
SIZED = {"gemma3": {"general.type": "model", "gemma3.rope.scaling.attn_factor": 1.0}, "qwen35": {}}
"""Keys that such files may have besides those of the tests."""


@pytest.mark.parametrize("architecture", SIZED)
def test_any_value_of_any_key_is_read_or_refused(architecture, tmp_path):
    """Numbers, texts and arrays in the place of each other, up to the tables of rotation."""
    whole = with_keys(architecture, {})
    for key in (*whole.metadata, *SIZED[architecture]):
        for value in ODD_VALUES:
            path = whole.write(tmp_path / "model.gguf", {key: value})
            with suppress(ModelFileError), closing(open_model(path)) as model:
                for decl in model.graph(Limits(slots=1, context=64, pages=4)).buffers.values():
                    if decl.kind is BufferKind.CONSTANT:
                        constant_bytes(model, decl)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llama4", "attention.temperature_length"),
        ("mistral3", "rope.scaling.original_context_length"),
    ],
)
def test_queries_that_grow_too_often_are_refused(architecture, key, tmp_path):
    """Of each growth the logarithm is computed, so that a table of a million would take minutes."""
    keys = {"context_length": 1 << 14, key: 2, "attention.temperature_scale": 0.1}
    assert f"{architecture}.{key}: is 2, must be" in str(read_with(architecture, keys, tmp_path))


def test_yarn_needs_frequencies_that_differ(tmp_path):
    path = with_keys("llama", {**YARN, "rope.freq_base": 1.0}).write(tmp_path / "model.gguf")
    with closing(open_model(path)) as model:
        tables = model.graph(Limits(slots=1, context=64, pages=4)).buffers
        with pytest.raises(ModelFileError, match=r"keys llama.rope.*with a base of 1$"):
            constant_bytes(model, tables[TABLE])


def test_a_key_nobody_reads_is_not_felt(tmp_path):
    """Negative control: a silent reader fails."""
    before = read_with("llama", {}, tmp_path)
    after = read_with("llama", {"no_such_key": 3}, tmp_path)
    with pytest.raises(AssertionError, match="no_such_key"):
        assert_felt(before, after, ["no_such_key"])
