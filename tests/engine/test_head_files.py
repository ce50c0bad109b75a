"""Files of both kinds of heads that are broken: the error names the file, and the key or tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import F16, F32, DType
from contract.errors import ModelFileError, UnsupportedModel, ZincError
from contract.ir.nodes import BufferKind
from harness.host.drafting import open_draft_model
from harness.synth.dflash import BlockForm
from harness.synth.eagle import HeadForm
from reference.engine.drafters import drafter_limits, drafting_limits
from reference.limits import Limits
from reference.model.config.keys import MAX_LAYERS
from reference.model.config.read import DFLASH, EAGLE
from reference.model.dflash import BLOCK, MASK, SCALES, read_dflash_head
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import TensorSource
from reference.model.open import Model, open_model
from reference.model.weights import constant_bytes, weight_bytes
from tests.changed_models import write_changed
from tests.engine.headed_models import block_model, head_of, headed_model
from tests.engine.test_eagle_head import changed

SyntheticModel = Callable[..., Path]
FIELDS = {"architecture": "qwen3", "quant": "f32", "layers": 4, "hidden": 64, "seed": 7}
TOKENS = 160


def path_of(synthetic_model: SyntheticModel, kind: str) -> Path:
    """A model with a head of its kind, which has tokens and an output matrix of its own."""
    if kind == EAGLE:
        return headed_model(synthetic_model, HeadForm(own_output=True), **FIELDS)
    return block_model(synthetic_model, BlockForm(own_embedding=True, own_output=True), **FIELDS)


def read_all(path: Path, head: Path) -> None:
    """Open a model with a head, and read every byte that their graphs read."""
    with ExitStack() as owned:
        model = open_with(path, head, owned)
        limits = drafting_limits(Limits(slots=1, context=64, pages=4), 3, model.head)
        for graph in (model.graph(limits), model.draft_graph(drafter_limits(limits, model.head))):
            for decl in graph.buffers.values():
                if decl.kind is BufferKind.CONSTANT:
                    constant_bytes(model, decl)
                elif decl.kind is BufferKind.WEIGHT:
                    weight_bytes(model.tensors, decl)


def open_with(path: Path, head: Path, owned: ExitStack) -> Model:
    model = open_model(path)
    owned.callback(model.file.close)
    return open_draft_model(head, model, owned)[0]


def ids(dtype: DType, kind: str) -> dict[str, TensorSource]:
    return {"d2t": (dtype, (TOKENS,), np.arange(TOKENS).astype(kind))}


NOT_FINITE: dict[str, TensorSource] = {
    "output_norm.weight": (F32, (64,), np.full(64, np.nan, np.float32))
}
TOO_MANY = {"target_layers": np.zeros(MAX_LAYERS + 1, np.int32)}
BROKEN: dict[str, tuple[dict[str, object], dict[str, TensorSource], type[ZincError], str]] = {
    "angles": ({"rope.freq_base": 1e-30}, {}, ModelFileError, "keys .*rope"),
    "not finite": ({}, NOT_FINITE, ModelFileError, "tensor output_norm.weight: row 0 block 0"),
    "layers": (TOO_MANY, {}, ModelFileError, "key .*target_layers: has 4097 int32 entries"),
    "floats": (
        {"target_layers": [0.5] * 3},
        {},
        ModelFileError,
        "key .*target_layers: has 3 float32",
    ),
    "f32 ids": ({}, ids(F32, "<f4"), UnsupportedModel, "tensor d2t: is of type f32"),
    "f16 ids": ({}, ids(F16, "<f2"), UnsupportedModel, "tensor d2t: is of type f16"),
}


@pytest.mark.parametrize("kind", [EAGLE, DFLASH])
@pytest.mark.parametrize("name", BROKEN)
def test_the_head_and_what_is_wrong_are_named(
    synthetic_model: SyntheticModel, tmp_path: Path, kind: str, name: str
) -> None:
    keys, tensors, error, message = BROKEN[name]
    path, head = path_of(synthetic_model, kind), tmp_path / "head.gguf"
    changed(path, head, {f"{kind}.{key}": value for key, value in keys.items()}, replaced=tensors)
    with pytest.raises(error, match=f"^{re.escape(str(head))}: {message}"):
        read_all(path, head)


@pytest.mark.parametrize("kind", [EAGLE, DFLASH])
def test_a_whole_head_is_read(synthetic_model: SyntheticModel, tmp_path: Path, kind: str) -> None:
    """The control."""
    path = path_of(synthetic_model, kind)
    read_all(path, changed(path, tmp_path / "head.gguf", {}))


@pytest.mark.parametrize("name", SCALES)
def test_a_factor_of_the_head_is_felt(
    synthetic_model: SyntheticModel, tmp_path: Path, name: str
) -> None:
    """Also where the head uses the model's embedding and output matrix, whose factors it has where
    its own file names none."""
    scales = {"embedding": 2.0, "logits": 4.0, "residual": 1.0, "attention": 0.25}
    fields = {**FIELDS, "architecture": "granite", "scales": scales}
    path = block_model(synthetic_model, **fields)
    plain = changed(path, tmp_path / "plain.gguf", {})
    scaled = changed(path, tmp_path / "scaled.gguf", {f"{DFLASH}.{SCALES[name]}": 3.0})
    with ExitStack() as owned:
        whose = [open_with(path, head, owned) for head in (plain, scaled)]
        sizes = Limits(slots=1, context=16, pages=1, hidden_rows=1)
        assert whose[0].draft_graph(sizes) != whose[1].draft_graph(sizes)
        of_model, own = (one.head.scaled_as(one.config) for one in whose)  # type: ignore[union-attr]
        assert getattr(of_model, name) == getattr(whose[0].config, name)
        assert getattr(own, name) == 3.0


OF_WINDOWS = ("rope.freq_base_swa", "rope.dimension_count_swa", "attention.key_length_swa")


@pytest.mark.parametrize("key", [*OF_WINDOWS, "attention.value_length_swa"])
def test_other_keys_of_windows_are_refused(
    synthetic_model: SyntheticModel, tmp_path: Path, key: str
) -> None:
    path = path_of(synthetic_model, DFLASH)
    window = {f"{DFLASH}.attention.sliding_window": 24}
    head = changed(path, tmp_path / "head.gguf", {**window, f"{DFLASH}.{key}": 8})
    with pytest.raises(UnsupportedModel, match=f"{DFLASH}.{key}: is 8"):
        read_all(path, head)


def test_a_window_beyond_every_context_is_refused(
    synthetic_model: SyntheticModel, tmp_path: Path
) -> None:
    path = path_of(synthetic_model, DFLASH)
    head = changed(path, tmp_path / "head.gguf", {f"{DFLASH}.attention.sliding_window": 1 << 31})
    with pytest.raises(ModelFileError, match="sliding_window: is 2147483648"):
        read_all(path, head)


def test_the_mask_may_be_any_token(synthetic_model: SyntheticModel, tmp_path: Path) -> None:
    path = path_of(synthetic_model, DFLASH)
    read_all(path, changed(path, tmp_path / "head.gguf", {MASK: 0}))
    changed(path, tmp_path / "head.gguf", {MASK: -1})
    with pytest.raises(UnsupportedModel, match=f"key {MASK}: is -1"):
        read_all(path, tmp_path / "head.gguf")


def test_a_block_has_sixteen_rows_where_the_file_does_not_say(
    synthetic_model: SyntheticModel, tmp_path: Path
) -> None:
    source = head_of(block_model(synthetic_model, **{**FIELDS, "seed": 8}))
    assert source is not None
    path = write_changed(
        source, tmp_path / "head.gguf", lambda keys, _: keys.pop(f"{DFLASH}.{BLOCK}")
    )
    with open_gguf(path) as file:
        assert read_dflash_head(file).block_size == 16
