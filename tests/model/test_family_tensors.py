"""Which tensors a file of a family may and must hold."""

import re

import numpy as np
import pytest

from contract.errors import ModelFileError, UnsupportedModel
from contract.ir.source import RowSlice
from reference.model.families.tensors import ModelTensors
from reference.model.open import open_model
from tests.model.family_file import (
    CHANNELS,
    EXPERT_WIDTH,
    FULL_HEAD_DIM,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    TAPS,
    VALUE_HEADS,
    family_file,
)
from tests.model.test_family_graphs import graph_of, logits

FILES = (
    *("llama", "mixtral", "qwen3moe", "qwen35", "qwen35moe", "qwen3next", "qwen3next ssm_in"),
    *("gemma3", "gemma4 experts", "gemma4 per layer", "kimi-linear"),
)
OPTIONAL = re.compile(r"layer_output_scale|ffn_down_exps\.scale")
"""Tensors whose absence is a model of its own; in gemma4 also attn_v."""


@pytest.mark.parametrize("kind", FILES)
def test_every_missing_tensor_is_noticed(kind, tmp_path):
    """Without one tensor of the first two layers or of the whole model there is no graph."""
    for name in family_file(kind).values:
        file = family_file(kind)
        optional = OPTIONAL.search(name) or (file.architecture == "gemma4" and "attn_v." in name)
        if optional or re.match(r"blk\.[2-9]", name):
            continue
        del file.values[name]
        with pytest.raises(ModelFileError, match=r"tensor .*: (is missing|is not part)"):
            graph_of(file, tmp_path)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "name",
    [
        *("blk.0.attn_qk.weight", "blk.1.attn_sinks.weight", "blk.0.ffn_gate_inp.bias"),
        *("blk.0.ffn_gate_exps.scale", "rope_factors_long.weight", "mtp.weight"),
    ],
)
def test_a_surplus_tensor_is_refused(kind, name, tmp_path):
    file = family_file(kind)
    file.add(name, 2)
    with pytest.raises(UnsupportedModel, match=f"tensor {re.escape(name)}: is not part of a"):
        graph_of(file, tmp_path)


def test_a_quantizer_leaves_outer_axes_of_one_element_out(tmp_path):
    """llama.cpp's converter writes four axes for Kimi's convolutions, its quantizer three or two:
    the same graph and logits. Other shapes of as many elements are refused."""
    file, name = family_file("kimi-linear"), "blk.0.ssm_conv1d_k.weight"
    wide = logits(file.write(tmp_path / "wide.gguf"), 5)
    for one, value in file.values.items():
        file.values[one] = value.reshape(value.shape[2:] if one.endswith("ssm_a") else value.shape)
        if "ssm_conv1d" in one:
            file.values[one] = value.reshape(value.shape[1:])
    assert (logits(file.write(tmp_path / "narrow.gguf"), 5) == wide).all()
    file.values[name] = file.values[name].reshape(TAPS, 1, -1)
    with pytest.raises(ModelFileError, match=re.escape(f"{name}: has shape [{TAPS}, 1, ")):
        graph_of(file, tmp_path)


def test_a_name_from_a_file_cannot_control_a_terminal_or_a_log(tmp_path):
    file = family_file("llama")
    file.values["a\nERROR\x1b[31m\x9b\u202e"] = file.values["output_norm.weight"]
    with pytest.raises(
        UnsupportedModel, match=r"tensor a\\nERROR\\x1b\[31m\\x9b\\u202e: "
    ) as error:
        graph_of(file, tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("architecture", "name", "shape"),
    [
        ("qwen35", "blk.1.attn_q.weight", (2 * HEADS * HEAD_DIM, HIDDEN)),
        ("qwen35", "blk.0.ssm_conv1d.weight", (CHANNELS, TAPS)),
        ("qwen3next", "blk.0.ssm_ba.weight", (2 * VALUE_HEADS, HIDDEN)),
        ("qwen3moe", "blk.0.ffn_down_exps.weight", (6, HIDDEN, EXPERT_WIDTH)),
        ("gemma4", "blk.1.attn_k.weight", (FULL_HEAD_DIM, HIDDEN)),
        ("gemma4", "rope_freqs.weight", (FULL_HEAD_DIM // 2,)),
    ],
)
def test_a_wrong_shape_is_named_with_the_whole_one(architecture, name, shape, tmp_path):
    """Also where the graph uses a part of the tensor's rows."""
    file = family_file(architecture)
    assert file.values[name].shape == shape
    file.values[name] = file.values[name][:-1]
    says = f"tensor {name}: has shape .*; the metadata asks for {re.escape(str(list(shape)))}"
    with pytest.raises(ModelFileError, match=says):
        graph_of(file, tmp_path)


def test_a_tensor_of_which_rows_are_left_is_surplus(tmp_path):
    """Half of a stacked tensor is not the tensor; both halves are."""
    model = open_model(family_file("qwen35").write(tmp_path / "model.gguf"))
    name = "blk.1.attn_q.weight"
    tensors = ModelTensors("model.gguf", {name: model.file.tensors[name]})
    shape, size = (HEADS * HEAD_DIM, HIDDEN), 2 * HEAD_DIM
    tensors.take(name, *shape, rows=RowSlice(0, HEAD_DIM, size))
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.attn_q\.weight: is not part"):
        tensors.reject_unused("qwen35")
    tensors.take(name, *shape, rows=RowSlice(HEAD_DIM, size, size))
    tensors.reject_unused("qwen35")
    model.close()


def test_parameters_are_f32(tmp_path):
    file = family_file("qwen35")
    name = "blk.0.ssm_conv1d.weight"
    file.values[name] = file.values[name].astype(np.float16)
    with pytest.raises(UnsupportedModel, match=r"ssm_conv1d\.weight: is of type f16; expected f32"):
        graph_of(file, tmp_path)


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        (1, r"blk\.0\.ssm_conv1d\.weight: belongs to a layer that is a delta net, but layer 0 att"),
        (3, r"blk\.1\.attn_q\.weight: belongs to a layer that attends, but layer 1 is a delta net"),
    ],
)
def test_layers_of_the_other_kind_are_named(interval, message, tmp_path):
    """The interval is wrong, not a tensor."""
    file = family_file("qwen35", full_attention_interval=interval)
    with pytest.raises(ModelFileError, match=message + r".*qwen35\.full_attention_interval"):
        graph_of(file, tmp_path)


@pytest.mark.parametrize(("keys", "message"), [
    ({"attention__head_count_kv": [2] * 4}, r"blk\.0\.ssm_conv1d.*is a Mamba-2 layer, but layer"),
    ({"ssm__state_size": 24}, r"tensor blk\.0\.ssm_in\.weight: has shape"),
])  # fmt: skip
def test_sizes_of_mamba_are_consistent(keys, message, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        graph_of(family_file("granitehybrid", **keys), tmp_path)


@pytest.mark.parametrize(("family", "kv_heads", "message"), [
    ("lfm2", [2, 2, 0, 2],
     r"blk\.0\.shortconv\.conv\.weight: belongs to a layer that convolves, but la"),
    ("lfm2", [0, 0, 0, 2],
     r"blk\.1\.attn_q\.weight: belongs to a layer that attends, but layer 1 conv"),
    ("kimi-linear", [1, 1, 0, 1],
     r"blk\.0\.ssm_conv1d_q\.weight: belongs to a layer that is a delta net, but"),
    ("kimi-linear", [0, 0, 0, 1],
     r"blk\.1\.attn_kv_a_mqa\.weight: belongs to a layer that attends, but layer 1"),
])  # fmt: skip
def test_layers_without_kv_heads_do_not_attend(family, kv_heads, message, tmp_path):
    file = family_file(family, attention__head_count_kv=kv_heads)
    with pytest.raises(ModelFileError, match=message + rf".*{family}\.attention\.head_count_kv"):
        graph_of(file, tmp_path)


def test_divisors_of_frequencies_are_positive(tmp_path):
    file = family_file("gemma4")
    file.values["rope_freqs.weight"] = np.zeros(FULL_HEAD_DIM // 2, np.float32)
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight: holds a divisor that is not"):
        logits(file.write(tmp_path / "model.gguf"), 8)


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "position_embd.weight"), ("gemma4", "rope_freqs.weight")]
)
def test_tables_of_positions_are_of_any_float_type(kind, name, tmp_path):
    plain, short, broken = (family_file(kind) for _ in range(3))
    words = np.abs(plain.values[name]).view("<u4") >> np.uint32(16)
    plain.values[name] = (words << np.uint32(16)).view(np.float32)
    short.values[name] = words.astype(np.uint16)
    broken.values[name] = np.full_like(plain.values[name], np.nan)
    first, second = (
        logits(file.write(tmp_path / f"{n}.gguf"), 8) for n, file in enumerate((plain, short))
    )
    assert np.array_equal(first, second)
    with pytest.raises(ModelFileError, match=f"{name}: holds a"):
        logits(broken.write(tmp_path / "broken.gguf"), 8)


@pytest.mark.parametrize(("trained_on", "chosen"), [(64, "short"), (32, "long")])
def test_longrope_takes_the_divisors_of_the_engine_context(trained_on, chosen, tmp_path):
    """Up to the context of training the short ones, beyond it the long ones."""
    file, plain = family_file("llama"), family_file("llama")
    file.keys["rope.scaling.type"] = "longrope"
    file.keys["rope.scaling.original_context_length"] = trained_on
    for reach in ("short", "long"):
        name = f"rope_factors_{reach}.weight"
        file.add(name, HEAD_DIM // 2)
        file.values[name] = np.abs(file.values[name]) + np.float32(0.5)
    plain.values["rope_freqs.weight"] = file.values[f"rope_factors_{chosen}.weight"]
    first = logits(file.write(tmp_path / "longrope.gguf"), 8)
    second = logits(plain.write(tmp_path / "plain.gguf"), 8)
    assert np.array_equal(first, second)
    del file.values["rope_factors_long.weight"]
    with pytest.raises(ModelFileError, match=r"rope_factors_long\.weight: is missing"):
        graph_of(file, tmp_path)
