"""Files of both kinds of heads that are broken, not known, or not for the model: the error names
the file, and the key or tensor."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.dtypes import F16, F32, DType
from contract.errors import ModelFileError, RequestError, UnsupportedModel, ZincError
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
from tests.engine.headed_models import block_model, changed, head_of, headed_model

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
def test_the_head_and_what_is_wrong_are_named(synthetic_model, tmp_path, kind, name):
    keys, tensors, error, message = BROKEN[name]
    path, head = path_of(synthetic_model, kind), tmp_path / "head.gguf"
    changed(path, head, {f"{kind}.{key}": value for key, value in keys.items()}, replaced=tensors)
    with pytest.raises(error, match=f"^{re.escape(str(head))}: {message}"):
        read_all(path, head)


@pytest.mark.parametrize("kind", [EAGLE, DFLASH])
def test_a_whole_head_is_read(synthetic_model, tmp_path, kind):
    """The control."""
    path = path_of(synthetic_model, kind)
    read_all(path, changed(path, tmp_path / "head.gguf"))


@pytest.mark.parametrize("name", SCALES)
def test_a_factor_of_the_head_is_felt(synthetic_model, tmp_path, name):
    """Also where the head uses the model's embedding and output matrix, whose factors it has where
    its own file names none."""
    scales = {"embedding": 2.0, "logits": 4.0, "residual": 1.0, "attention": 0.25}
    fields = {**FIELDS, "architecture": "granite", "scales": scales}
    path = block_model(synthetic_model, **fields)
    plain = changed(path, tmp_path / "plain.gguf")
    scaled = changed(path, tmp_path / "scaled.gguf", {f"{DFLASH}.{SCALES[name]}": 3.0})
    with ExitStack() as owned:
        whose = [open_with(path, head, owned) for head in (plain, scaled)]
        sizes = Limits(slots=1, context=16, pages=1, hidden_rows=1)
        assert whose[0].draft_graph(sizes) != whose[1].draft_graph(sizes)
        of_model, own = (one.head.scaled_as(one.config) for one in whose)  # type: ignore[union-attr]
        assert getattr(of_model, name) == getattr(whose[0].config, name)
        assert getattr(own, name) == 3.0


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    (EAGLE, {"hidden": 128}, "reads rows of 64 elements; .* 128"),
    (DFLASH, {"hidden": 128}, "reads rows of 64 elements; .* 128"),
    (EAGLE, {"architecture": "gemma3"}, "another vocabulary: token 0"),
    (DFLASH, {"architecture": "gemma3"}, "another vocabulary: token 0"),
    (EAGLE, {"layers": 1}, "reads layer 2; the model has 1"),
    (EAGLE, {"vocab": 305}, "drafts token 318; the model has 305 tokens"),
    (DFLASH, {"layers": 1}, "reads layer 3; the model has 1"),
    (DFLASH, {"vocab": 305}, "drafts token 318; the model has 305 tokens"),
    (DFLASH, {"vocab": 319}, "mask token 319; the model has 319 tokens"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), MISFITS)
def test_the_first_difference_is_named(synthetic_model, kind, fields, message):
    head, other = head_of(path_of(synthetic_model, kind)), synthetic_model(**{**FIELDS, **fields})
    assert head is not None
    with pytest.raises(RequestError, match=message):
        read_all(other, head)


WINDOW = f"{DFLASH}.attention.sliding_window"
OF_WINDOWS = [
    *("rope.freq_base_swa", "rope.dimension_count_swa", "attention.key_length_swa"),
    "attention.value_length_swa",
]
NOT_KNOWN: list[tuple[str, dict[str, object], type[ZincError], str]] = [
    (EAGLE, {"eagle3.block_count": 2}, UnsupportedModel, "a head has one layer"),
    (EAGLE, {"eagle3.target_layers": [1, 2]}, UnsupportedModel, "has 2 layers"),
    (EAGLE, {"eagle3.attention.sliding_window": 32}, UnsupportedModel, "sliding_window: is 32"),
    (DFLASH, {"dflash.hyper_connection.count": 4}, UnsupportedModel, "hyper-connections"),
    (DFLASH, {"dflash.attention.causal": True}, UnsupportedModel, "only non-causal models"),
    (DFLASH, {"dflash.sample_from_anchor": True}, UnsupportedModel, "the row of the last token"),
    (DFLASH, {"dflash.hidden_activation": "gelu"}, UnsupportedModel, "heads with silu"),
    (DFLASH, {"dflash.expert_count": 8}, UnsupportedModel, "expert_count: is 8"),
    *((DFLASH, {WINDOW: 24, f"{DFLASH}.{key}": 8}, UnsupportedModel, f"{DFLASH}.{key}: is 8")
      for key in OF_WINDOWS),
    (DFLASH, {WINDOW: 1 << 31}, ModelFileError, "sliding_window: is 2147483648"),
    (DFLASH, {MASK: -1}, UnsupportedModel, f"key {MASK}: is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "keys", "error", "message"), NOT_KNOWN)
def test_variants_are_refused(synthetic_model, tmp_path, kind, keys, error, message):
    path = path_of(synthetic_model, kind)
    with pytest.raises(error, match=message):
        read_all(path, changed(path, tmp_path / "head.gguf", keys))


NO_PART = "is not part of a {} model"
SURPLUS = [
    *((EAGLE, tensor, NO_PART.format(EAGLE))
      for tensor in ("enc.output_norm.weight", "fc.weight_scale", "d2t.weight")),
    (DFLASH, "markov_w1.weight", "Markov head"), (DFLASH, "conf_proj.weight", "confidence head"),
    (DFLASH, "selector_hidden.weight", "selector"),
    (DFLASH, "blk.0.attn_conv_base", "convolution"),
    (DFLASH, "blk.1.ffn_conv_proj.weight", "convolution"),
    (DFLASH, "blk.0.hc_attn_fn.weight", "hyper-connections"),
    (DFLASH, "blk.0.attn_k.bias", "changes keys or values"),
    (DFLASH, "blk.1.attn_v.scale", "changes keys or values"),
    *((DFLASH, tensor, NO_PART.format(DFLASH))
      for tensor in ("blk.0.something.weight", "blk.weight", "fc.weight_scale", "d2t.weight",
                     "enc.output_norm.weight2")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensor", "message"), SURPLUS)
def test_a_tensor_that_no_formula_reads_is_refused(
    synthetic_model, tmp_path, kind, tensor, message
):
    """A norm of the inputs counts where the file says that they are normed; parts of newer heads
    have names."""
    path = path_of(synthetic_model, kind)
    with pytest.raises(UnsupportedModel, match=f"{tensor}: .*{message}"):
        read_all(path, changed(path, tmp_path / "head.gguf", more=tensor))


MISSING: list[tuple[str, str, type[ZincError], str]] = [
    (EAGLE, "fc.weight", ModelFileError, "tensor fc.weight: is missing"),
    (EAGLE, "blk.0.attn_norm_2.weight", ModelFileError, "attn_norm_2.weight: is missing"),
    (EAGLE, "output.weight", RequestError, f"no output.weight, but {TOKENS} tokens of its own"),
    (DFLASH, "fc.weight", ModelFileError, "tensor fc.weight: is missing"),
    (DFLASH, "blk.1.attn_k_norm.weight", ModelFileError, "attn_k_norm.weight: is missing"),
    (DFLASH, "output_norm.weight", ModelFileError, "output_norm.weight: is missing"),
]


@pytest.mark.parametrize(("kind", "tensor", "error", "message"), MISSING)
def test_a_missing_tensor_is_named(synthetic_model, tmp_path, kind, tensor, error, message):
    path = path_of(synthetic_model, kind)
    with pytest.raises(error, match=message):
        read_all(path, changed(path, tmp_path / "head.gguf", without=tensor))


def test_the_mask_may_be_any_token(synthetic_model, tmp_path):
    path = path_of(synthetic_model, DFLASH)
    read_all(path, changed(path, tmp_path / "head.gguf", {MASK: 0}))


def test_a_block_has_sixteen_rows_where_the_file_does_not_say(synthetic_model, tmp_path):
    source = head_of(block_model(synthetic_model, **{**FIELDS, "seed": 8}))
    assert source is not None
    path = write_changed(
        source, tmp_path / "head.gguf", lambda keys, _: keys.pop(f"{DFLASH}.{BLOCK}")
    )
    with open_gguf(path) as file:
        assert read_dflash_head(file).block_size == 16
