"""Plans a synthetic model's tensors: names, shapes, and the spread of their values.

The model family builds its graph from the planned metadata, and every tensor it requests is
recorded. Values are drawn so that activations have the sizes of trained models: rows of matrices
have norm 1, norm weights are near 1, routers distinguish experts, delta-net states decay slowly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from contract.dtypes import F32, DType
from contract.errors import ConfigError, ModelFileError, UnsupportedModel
from contract.ir.source import RowSlice
from harness.synth.architectures import BIASED, FALCON_H1, GEMMA3N, KIMI_LINEAR, LAYER_NORMED
from harness.synth.metadata import architecture_keys, shared_keys
from harness.synth.planted import EMBEDDING_DEVIATION, planted_mean
from harness.synth.spec import SynthSpec
from harness.synth.tensors import VECTOR_KINDS, SynthTensor, with_types
from reference.limits import Limits
from reference.model.config import ModelConfig, read_config
from reference.model.families import FAMILIES
from reference.model.families.tensors import ModelTensors
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import HOLE, TensorSource, write_gguf

NORM_DEVIATION = 0.1
BIAS_DEVIATION = 0.1
MIX_DEVIATION = 0.1
GATE_BIAS_DEVIATION = 3.0
"""Deviation of the biases of experts' gates, so that some exceed the bounds of the clamped gate."""
CHOICE_DEVIATION = 0.3
ROUTER_SPREAD = 2.0
"""Deviation of router logits, so that probabilities differ and several experts matter."""

LONG_ROPE = ("rope_factors_long", "rope_factors_short")
"""Tensors of frequency divisors for contexts beyond the original one, and up to it."""

FILE_ORDER = (
    "token_embd", "position_embd", "rope_freqs", *LONG_ROPE, "per_layer_token_embd",
    "per_layer_model_proj", "per_layer_proj_norm", "altup_proj", "altup_unembd_proj",
    "token_embd_norm", "attn_norm", "attn_norm.bias",
    "attn_norm_2", "attn_norm_2.bias", "attn_q", "attn_q.bias", "attn_k",
    "attn_k.bias", "attn_v", "attn_v.bias", "attn_qkv", "attn_qkv.bias", "attn_q_norm",
    "attn_k_norm", "attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_kv_a_norm",
    "attn_k_b", "attn_v_b", "attn_output", "attn_output.bias", "attn_sinks", "attn_gate",
    "ssm_in", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ssm_f_a", "ssm_f_b", "ssm_g_a",
    "ssm_g_b", "ssm_conv1d", "ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d",
    "ssm_ba", "ssm_beta", "ssm_alpha", "ssm_norm", "ssm_out", "shortconv.conv",
    "shortconv.in_proj", "shortconv.out_proj", "post_attention_norm", "ffn_norm", "ffn_norm.bias",
    "ffn_gate", "ffn_up", "ffn_up.bias", "ffn_down", "ffn_down.bias",
    "ffn_gate_inp", "ffn_gate_inp.bias", "exp_probs_b", "exp_probs_b.bias",
    "ffn_gate_exps",
    "ffn_gate_exps.bias", "ffn_up_exps", "ffn_up_exps.bias", "ffn_gate_up_exps", "ffn_down_exps",
    "ffn_down_exps.bias", "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
    "post_ffw_norm", "ffn_gate_inp.scale", "ffn_down_exps.scale", "pre_ffw_norm_2",
    "post_ffw_norm_1", "post_ffw_norm_2", "altup_correct_coef", "altup_correct_scale",
    "altup_predict_coef", "altup_router", "altup_router_norm", "laurel_l", "laurel_r",
    "laurel_post_norm", "inp_gate", "proj", "post_norm", "layer_output_scale",
    "nextn.eh_proj", "nextn.embed_tokens", "nextn.enorm", "nextn.hnorm",
    "nextn.shared_head_norm",
    "output_norm", "output_norm.bias", "output", "output.bias",
)  # fmt: skip
"""Kinds of tensors in file order, within a layer and outside of layers."""


@dataclass(slots=True)
class PlannedTensors(ModelTensors):
    """A file that has every tensor a family requests; ``shapes`` records their shapes."""

    spec: SynthSpec = field(default_factory=SynthSpec)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the specification gives the model this optional tensor."""
        spec, biased = self.spec, self.spec.architecture in BIASED
        block, kind = block_and_kind(name)
        match kind:
            case "attn_qkv":
                return spec.fused_qkv and spec.owns_values(block)
            case "attn_v":
                return spec.owns_values(block) or spec.architecture == GEMMA3N
            case "attn_k" | "attn_k_norm":
                return spec.architecture == GEMMA3N
            case "attn_q.bias" | "attn_k.bias" | "attn_v.bias" | "attn_qkv.bias":
                return spec.has_qkv_bias
            case "attn_output.bias":
                return spec.attention_output_bias or spec.has_sinks or biased
            case "ffn_up.bias" | "ffn_down.bias":
                return biased
            case "attn_norm.bias" | "attn_norm_2.bias" | "ffn_norm.bias" | "output_norm.bias":
                return spec.architecture in LAYER_NORMED
            case "attn_norm_2" if name.endswith(".weight"):
                return spec.architecture == "falcon" and spec.parallel
            case "output.bias":
                return spec.architecture == "phi2"
            case "attn_q_norm":
                return spec.head_norms
            case "attn_sinks" | "ffn_gate_inp.bias":
                return spec.has_sinks
            case "ffn_gate_exps.bias" | "ffn_up_exps.bias" | "ffn_down_exps.bias":
                return spec.has_sinks
            case "ssm_in":
                return spec.recurrent is not None and spec.recurrent.packing == "ssm_in"
            case "ssm_conv1d.bias":
                return spec.mamba is not None
            case "ffn_norm" if name.endswith(".weight"):
                joined = spec.architecture == "stablelm" and spec.parallel
                return spec.architecture not in ("phi2", "falcon") and not joined
            case "exp_probs_b":  # without a suffix
                return spec.architecture == "hy_v3"
            case "ffn_norm":  # without a suffix
                return spec.architecture == FALCON_H1
            case "ssm_norm":
                return spec.mamba is not None and spec.mamba.normed
            case "ssm_ba":
                return spec.architecture == "qwen3next"
            case "ffn_gate_up_exps":
                return spec.experts is not None and spec.experts.fused
            case "ffn_gate_inp" | "ffn_down_exps.scale":
                return spec.gemma is not None and spec.experts is not None
            case "layer_output_scale":
                return spec.gemma is not None and spec.gemma.output_scale
            case "output":
                return not spec.tied
            case _:
                return False

    def take(self, name: str, *shape: int, rows: RowSlice | None = None) -> DType:
        """Record the shape of the whole tensor."""
        if rows is not None:
            shape = (*shape[:-2], rows.group * shape[-2] // len(rows.selected()), shape[-1])
        self.shapes[name] = shape
        return F32


def plan_tensors(spec: SynthSpec) -> tuple[SynthTensor, ...]:
    """Every tensor of the model in file order, with its type before any expansion to F32. Raises
    ConfigError when the family accepts no model of this specification."""
    planned = PlannedTensors(spec.name, {}, spec=spec)
    try:
        FAMILIES[spec.architecture](_config(spec), planned, Limits(slots=1, context=16, pages=1))
    except (ModelFileError, UnsupportedModel) as error:
        raise ConfigError(f"synthetic model: {error}") from None
    for block in range(spec.layers, spec.blocks):
        planned.shapes[f"blk.{block}.nextn.eh_proj.weight"] = (spec.hidden, 2 * spec.hidden)
        if spec.mtp_agreement is not None:
            planned.shapes[f"blk.{block}.nextn.embed_tokens.weight"] = (spec.vocab, spec.hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            planned.shapes[f"blk.{block}.nextn.{name}.weight"] = (spec.hidden,)

    def order(name: str) -> tuple[int, int]:
        block, kind = block_and_kind(name)
        outside = spec.blocks if kind in FILE_ORDER[-4:] else -1
        return (block if name.startswith("blk.") else outside, FILE_ORDER.index(kind))

    names = sorted(planned.shapes, key=order)
    return with_types(spec, [_tensor(spec, name, planned.shapes[name]) for name in names])


def block_and_kind(name: str) -> tuple[int, str]:
    """The block (0 for a tensor outside the blocks) and the kind: the name without block and
    ``.weight``."""
    kind = name.removesuffix(".weight")
    if not kind.startswith("blk."):
        return 0, kind
    _, block, kind = kind.split(".", 2)
    return int(block), kind


def _config(spec: SynthSpec) -> ModelConfig:
    """The configuration read from the metadata, with prediction blocks counted as attention
    layers."""
    keys = architecture_keys(spec) | {"nextn_predict_layers": 0}
    if spec.recurrent is not None and spec.architecture != KIMI_LINEAR:
        listed = [spec.is_recurrent(block) for block in range(spec.blocks)]
        keys["attention.recurrent_layers"] = listed
    metadata = {f"{spec.architecture}.{key}": value for key, value in keys.items()}
    metadata |= shared_keys(spec)
    tensors: dict[str, TensorSource] = {"token_embd.weight": (F32, (spec.vocab, 1), HOLE)}
    if spec.architecture == "ernie4_5-moe":
        tensors[f"blk.{spec.leading_dense}.exp_probs_b.bias"] = (F32, (1,), HOLE)
    divisors = ("rope_freqs",) if spec.rope_freqs else ()
    for name in LONG_ROPE if spec.long_rope else divisors:
        tensors[f"{name}.weight"] = (F32, (spec.head_dim // 2,), HOLE)
    with TemporaryDirectory() as folder:
        path = Path(folder, "header.gguf")
        write_gguf(path, {"general.architecture": spec.architecture, **metadata}, tensors)
        with open_gguf(path) as file:
            return read_config(file)


def _tensor(spec: SynthSpec, name: str, shape: tuple[int, ...]) -> SynthTensor:
    """The tensor of this name and shape, and how it is drawn."""
    block, kind = block_and_kind(name)
    if kind in ("rope_freqs", *LONG_ROPE):
        return SynthTensor(name, shape, (), 0.0)
    centre, deviation = _spread(spec, kind, shape)
    repeats, parts = _parts(spec, block, kind)
    if parts:
        named = tuple((f"blk.{block}.{part}", rows) for part, rows in parts)
        return SynthTensor(name, shape, named, deviation, centre, repeats)
    rows = math.prod(shape if kind in VECTOR_KINDS else shape[:-1] or shape)
    return SynthTensor(name, shape, ((name, rows),), deviation, centre)


def _spread(spec: SynthSpec, kind: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of the values."""
    root = math.sqrt(shape[-1])
    if spec.planted:
        if kind == "token_embd":
            return 0.0, EMBEDDING_DEVIATION
        if (mean := planted_mean(spec, kind)) is not None:
            return mean, NORM_DEVIATION * mean
    match kind:
        case "ssm_dt.bias":  # time steps of about softplus(-3) = 0.05
            return -3.0, 0.5
        case "ssm_a":  # always negative, since values lie within 3.5 deviations
            return -4.0, 1.0
        case "exp_probs_b" | "exp_probs_b.bias":  # as wide as the differences of sigmoids
            return 0.0, CHOICE_DEVIATION
        case "ffn_gate_exps.bias" | "ffn_up_exps.bias":
            return 0.0, GATE_BIAS_DEVIATION
        case "attn_sinks":  # as large as scores
            return 0.0, 1.0
        case "per_layer_token_embd":
            return 0.0, 1.0 / math.sqrt(shape[-1] // spec.layers)
        case "ffn_gate_inp":
            return 0.0, ROUTER_SPREAD / root
        case "ffn_gate_inp.scale":  # the router's input is divided by the root of the width
            return root, MIX_DEVIATION * root
        case "ffn_down_exps.scale" | "layer_output_scale" | "altup_correct_scale":
            return 1.0, MIX_DEVIATION
        case "altup_router":  # its input is divided by the width
            return 0.0, root
        case "altup_predict_coef" | "altup_correct_coef":
            return 0.0, MIX_DEVIATION / 2
        case "attn_q_norm" | "attn_k_norm" if spec.architecture in (GEMMA3N, "gemma4"):
            # Scores are not scaled; the norms of queries and keys do it.
            return 1.0 / math.sqrt(root), NORM_DEVIATION / math.sqrt(root)
    if "norm" in kind:
        return 1.0, NORM_DEVIATION
    return 0.0, BIAS_DEVIATION if kind.endswith(".bias") else 1.0 / root


def _parts(spec: SynthSpec, block: int, kind: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The matrices in a tensor, (drawn name, rows), and how often they repeat; () for one
    matrix."""
    if kind in ("attn_qkv", "attn_qkv.bias") and not spec.is_recurrent(block):
        queries = spec.heads * spec.head_dim_of(block) * (2 if spec.recurrent else 1)
        keys = spec.kv_heads_of(block) * spec.head_dim_of(block)
        suffix = "bias" if kind.endswith("bias") else "weight"
        rows = (("attn_q", queries), ("attn_k", keys), ("attn_v", keys))
        return 1, tuple((f"{name}.{suffix}", count) for name, count in rows)
    if kind == "ffn_gate_up_exps" and spec.experts is not None:
        names = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
        return spec.experts.count, tuple((name, spec.experts.width) for name in names)
    if spec.recurrent is None:
        return 1, ()
    heads, state, inner = spec.recurrent.key_heads, spec.recurrent.state, spec.recurrent.inner
    keys, values = heads * state, inner // heads
    by_kind: Mapping[str, tuple[int, tuple[tuple[str, int], ...]]] = {
        "attn_qkv": (1, (("ssm_in.q", keys), ("ssm_in.k", keys), ("ssm_in.v", inner))),
        "attn_gate": (1, (("ssm_in.z", inner),)),
        "ssm_in": (
            heads,
            (("ssm_in.q", state), ("ssm_in.k", state), ("ssm_in.v", values), ("ssm_in.z", values)),
        ),
        "ssm_ba": (
            heads,
            tuple(
                (f"ssm_{name}.weight", spec.recurrent.value_heads // heads)
                for name in ("beta", "alpha")
            ),
        ),
    }
    return by_kind.get(kind, (1, ()))
