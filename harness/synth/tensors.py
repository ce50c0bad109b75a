"""The tensors of a synthetic model: their storage types and the source of their values.

Shapes are row-major. The mixtures ``q4_k_m`` and ``mxfp4_moe``, and the types used for rows of odd
lengths, are those of llama.cpp's quantizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import BF16, BY_NAME, F16, F32, MXFP4, Q4_K, Q5_K, Q6_K, Q8_0, DType
from harness.synth.draw import draw_matrix, normal_like, random_bits, random_bytes
from harness.synth.planted import is_copied, planted_rows, planted_type
from harness.synth.spec import EXPERTS_QUANT, MIXED_QUANT, SynthSpec
from reference.quant import FORMATS

FALLBACK = {
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q2_k": "q4_0", "q3_k": "q4_0",
    "iq4_xs": "iq4_nl",
}  # fmt: skip
"""Types of 32-element blocks for rows that are not whole super-blocks."""

VECTOR_KINDS = ("ssm_a", "ssm_d", "ssm_norm", "attn_q_norm", "attn_k_norm")
"""Vectors that some architectures store as matrices."""
FLOAT_KINDS = (
    *(*VECTOR_KINDS, "ffn_gate_inp", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
    *("conv", "laurel_l", "laurel_r", "altup_proj"),
    *(
        "altup_unembd_proj",
        "altup_correct_coef",
        "altup_predict_coef",
        "altup_router",
        "position_embd",
    ),
)
"""Matrices that are never quantized."""
SENSITIVE_VALUES = ("attn_v", "attn_qkv")
SENSITIVE_DOWNS = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
BILLIONS_70_LAYERS = 80
"""Layers of the 70 B llama and qwen2 models, whose value matrices get more bits."""

OF_KEYS = (".attn_k.bias", ".attn_k_norm.weight")
OUTLIER_CHANNELS = (3, 5)
"""Channels of every KV head that are outliers when the specification has them."""

ROPE_FREQS_MAX = 8.0
ROPE_FREQS_NEVER = 1e30
"""A frequency divisor so large that the angle is 0."""


@dataclass(frozen=True, slots=True)
class SynthTensor:
    """One tensor of the file.

    ``parts`` are the matrices in it as (drawn name, rows); their rows repeat ``repeats`` times, for
    example gate and up rows for every expert. Values have mean ``centre`` and this deviation;
    unless quantized they lie within 3.5 deviations."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    deviation: float
    centre: float = 0.0
    repeats: int = 1
    dtype: DType = F32

    @property
    def nbytes(self) -> int:
        """Stored size."""
        return math.prod(self.shape[:-1]) * self.dtype.row_bytes(self.shape[-1])

    @property
    def kind(self) -> str:
        """The name without layer and suffix."""
        return self.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def layer(self) -> int:
        """The layer, 0 for a global tensor."""
        words = self.name.split(".")
        return int(words[1]) if words[0] == "blk" else 0


def with_types(spec: SynthSpec, tensors: Sequence[SynthTensor]) -> tuple[SynthTensor, ...]:
    """The tensors with the storage type each has in the file, before any expansion."""
    values = [tensor.name for tensor in tensors if tensor.kind in SENSITIVE_VALUES]
    typed = [replace(tensor, dtype=stored_type(spec, tensor, values)) for tensor in tensors]
    if not spec.planted:
        return tuple(typed)
    embedding = next(tensor.dtype for tensor in typed if tensor.kind == "token_embd")
    planted = ((tensor, planted_type(spec, planted_kind(tensor), embedding)) for tensor in typed)
    return tuple(tensor if t is None else replace(tensor, dtype=t) for tensor, t in planted)


def planted_kind(tensor: SynthTensor) -> str:
    """The name without block and suffix."""
    return tensor.name.removesuffix(".weight").removeprefix(f"blk.{tensor.layer}.")


def stored_type(spec: SynthSpec, tensor: SynthTensor, values: Sequence[str]) -> DType:
    """The storage type of a tensor before any expansion; ``values`` names those of values."""
    if len(tensor.shape) == 1 or tensor.kind in FLOAT_KINDS or tensor.name.endswith(".bias"):
        return F32
    if spec.quant == EXPERTS_QUANT:
        dtype = MXFP4 if tensor.kind.endswith("_exps") else Q8_0
    elif spec.quant == MIXED_QUANT:
        dtype = _mixed(spec, tensor, values)
    else:
        dtype = BY_NAME[spec.quant]
    if tensor.kind == "per_layer_model_proj" and dtype not in (F32, F16):
        return BF16
    columns = tensor.shape[-1]
    if columns % dtype.block_elements:
        dtype = BY_NAME[FALLBACK.get(dtype.name, dtype.name)]
    return F16 if columns % dtype.block_elements else dtype


def _mixed(spec: SynthSpec, tensor: SynthTensor, values: Sequence[str]) -> DType:
    kind, eight = tensor.kind, spec.experts is not None and spec.experts.count == 8
    if kind == "output" or (kind in ("token_embd", "per_layer_token_embd") and spec.tied):
        return Q6_K
    if eight and kind in ("attn_k", *SENSITIVE_VALUES):
        return Q8_0
    if eight and kind == "attn_output":
        return Q5_K
    if kind in SENSITIVE_VALUES and more_bits(values.index(tensor.name), len(values)):
        return Q6_K
    if kind in SENSITIVE_DOWNS and more_bits(tensor.layer, spec.blocks):
        return Q6_K
    large = spec.layers == BILLIONS_70_LAYERS and spec.architecture in ("llama", "qwen2")
    return Q5_K if kind == "attn_v" and large else Q4_K


def more_bits(index: int, count: int) -> bool:
    """Whether ``q4_k_m`` stores the most sensitive matrices of layer ``index`` in Q6_K."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def tensor_data(spec: SynthSpec, tensor: SynthTensor) -> Iterator[Bytes]:
    """The bytes of a tensor in file order, in chunks; binary32 if the specification expands."""
    if tensor.name.startswith("rope_f"):
        yield rope_divisors(spec, tensor.name)
    elif len(tensor.shape) == 1 or planted_kind(tensor) in VECTOR_KINDS:
        for name, count in tensor.parts:
            values = normal_like(random_bits(spec.seed, name), count, tensor.deviation)
            values = (np.float32(tensor.centre) + values).astype("<f4")
            if spec.key_outliers and name.endswith(OF_KEYS):
                values.reshape(-1, spec.head_dim_of(tensor.layer))[:, OUTLIER_CHANNELS] = (
                    spec.key_outliers
                )
            yield values.view(np.uint8)
    else:
        kind, dtype = planted_kind(tensor), tensor.dtype
        copied = is_copied(spec, kind)
        for blocks in planted_rows(spec, kind, dtype) if copied else _rows(spec, tensor):
            if spec.expand_to_f32:
                values = FORMATS[tensor.dtype].dequantize(blocks)
                yield np.ascontiguousarray(values, "<f4").view(np.uint8)
            else:
                yield blocks


def _rows(spec: SynthSpec, tensor: SynthTensor) -> Iterator[Bytes]:
    """The stored rows of a matrix in file order, uint8[some rows, row_bytes]."""
    columns = tensor.shape[-1]
    drawn = [
        draw_matrix(spec.seed, name, tensor.dtype, rows * tensor.repeats, columns, tensor.deviation)
        for name, rows in tensor.parts
    ]
    if tensor.repeats == 1:
        yield from chain.from_iterable(drawn)
        return
    counts = [rows for _, rows in tensor.parts]
    slices = [_row_groups(chunks, count) for chunks, count in zip(drawn, counts, strict=True)]
    for parts in zip(*slices, strict=True):
        yield from parts


def _row_groups(chunks: Iterable[Bytes], rows: int) -> Iterator[Bytes]:
    """Yield the rows of ``chunks``, ``rows`` at a time."""
    held: list[Bytes] = []
    count = 0
    for chunk in chunks:
        held.append(chunk)
        count += len(chunk)
        if count < rows:
            continue
        whole = np.concatenate(held)
        for first in range(0, count - count % rows, rows):
            yield whole[first : first + rows]
        count %= rows
        held = [whole[len(whole) - count :]]


def rope_divisors(spec: SynthSpec, name: str) -> Bytes:
    """Divisors of the rotary frequencies: in [1, 8), increasing as in published models.

    Gemma has 1 for the first quarter of the pairs; its other pairs do not rotate."""
    pairs = spec.head_dim // 2
    if spec.gemma is not None:
        factors = np.full(pairs, ROPE_FREQS_NEVER, np.float32)
        factors[: pairs // 4] = 1.0
        return factors.astype("<f4").view(np.uint8)
    drawn = np.sort(random_bytes(random_bits(spec.seed, name), pairs))
    step = np.float32((ROPE_FREQS_MAX - 1.0) / 256)
    return (np.float32(1.0) + drawn.astype(np.float32) * step).astype("<f4").view(np.uint8)
