"""The tensors of a synthetic model: names, shapes, storage types and where their values come from.

Shapes are row-major. The mixture ``q4_k_m`` and the types a row of odd length falls back to are
those of llama.cpp's quantizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contract.dtypes import (
    BY_NAME,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
)
from harness.synth.draw import Bytes, draw_matrix, normal_like, random_bits, random_bytes
from harness.synth.spec import MIXED_QUANT, SynthSpec
from reference.quant import FORMATS

FALLBACK = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0, Q2_K: Q4_0, Q3_K: Q4_0, IQ4_XS: IQ4_NL}
"""Types of 32-element blocks for rows that are not whole super-blocks."""

NORM_DEVIATION = 0.1
BIAS_DEVIATION = 0.1
ROPE_FREQS_MAX = 8.0


@dataclass(frozen=True, slots=True)
class SynthTensor:
    """One tensor of the file. ``parts`` are the matrices stacked in it: (drawn name, rows)."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Stored size."""
        return math.prod(self.shape[:-1]) * self.dtype.row_bytes(self.shape[-1])


def plan_tensors(spec: SynthSpec) -> tuple[SynthTensor, ...]:
    """Every tensor of the model, in file order, with its type before any expansion."""
    tensors = [_matrix(spec, "token_embd", spec.vocab, spec.hidden, embedding=True)]
    if spec.rope_freqs:
        tensors.append(SynthTensor("rope_freqs.weight", (spec.head_dim // 2,), F32))
    for layer in range(spec.layers):
        tensors += _layer(spec, layer)
    tensors.append(_vector("output_norm.weight", spec.hidden))
    if not spec.tied:
        tensors.append(_matrix(spec, "output", spec.vocab, spec.hidden))
    return tuple(tensors)


def _layer(spec: SynthSpec, layer: int) -> Iterator[SynthTensor]:
    prefix = f"blk.{layer}"
    queries = spec.heads * spec.head_dim
    keys = spec.kv_heads * spec.head_dim
    width = spec.feed_forward_widths[layer]
    projections = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
    yield _vector(f"{prefix}.attn_norm.weight", spec.hidden)
    if spec.fused_qkv:
        rows = sum(projections.values())
        dtype = _dtype(spec, "attn_qkv", layer, spec.hidden)
        parts = tuple((f"{prefix}.{name}.weight", rows) for name, rows in projections.items())
        yield SynthTensor(f"{prefix}.attn_qkv.weight", (rows, spec.hidden), dtype, parts)
        if spec.has_qkv_bias:
            parts = tuple((f"{prefix}.{name}.bias", rows) for name, rows in projections.items())
            yield SynthTensor(f"{prefix}.attn_qkv.bias", (rows,), F32, parts)
    else:
        for name, rows in projections.items():
            yield _matrix(spec, f"{prefix}.{name}", rows, spec.hidden, layer)
            if spec.has_qkv_bias:
                yield _vector(f"{prefix}.{name}.bias", rows)
    if spec.has_qk_norm:
        yield _vector(f"{prefix}.attn_q_norm.weight", spec.head_dim)
        yield _vector(f"{prefix}.attn_k_norm.weight", spec.head_dim)
    yield _matrix(spec, f"{prefix}.attn_output", spec.hidden, queries, layer)
    if spec.attention_output_bias:
        yield _vector(f"{prefix}.attn_output.bias", spec.hidden)
    yield _vector(f"{prefix}.ffn_norm.weight", spec.hidden)
    yield _matrix(spec, f"{prefix}.ffn_gate", width, spec.hidden, layer)
    yield _matrix(spec, f"{prefix}.ffn_up", width, spec.hidden, layer)
    yield _matrix(spec, f"{prefix}.ffn_down", spec.hidden, width, layer)


def _vector(name: str, width: int) -> SynthTensor:
    return SynthTensor(name, (width,), F32, ((name, width),))


def _matrix(
    spec: SynthSpec, name: str, rows: int, columns: int, layer: int = 0, embedding: bool = False
) -> SynthTensor:
    kind = "token_embd" if embedding else name.rpartition(".")[2]
    dtype = _dtype(spec, kind, layer, columns)
    full = f"{name}.weight"
    return SynthTensor(full, (rows, columns), dtype, ((full, rows),))


def _dtype(spec: SynthSpec, kind: str, layer: int, columns: int) -> DType:
    dtype = _mixed(spec, kind, layer) if spec.quant == MIXED_QUANT else BY_NAME[spec.quant]
    if columns % dtype.block_elements:
        dtype = FALLBACK.get(dtype, dtype)
    return F16 if columns % dtype.block_elements else dtype


def _mixed(spec: SynthSpec, kind: str, layer: int) -> DType:
    if kind == "output" or (kind == "token_embd" and spec.tied):
        return Q6_K
    if kind in ("attn_v", "attn_qkv", "ffn_down") and more_bits(layer, spec.layers):
        return Q6_K
    return Q4_K


def more_bits(index: int, count: int) -> bool:
    """The layers of ``q4_k_m`` whose most sensitive matrices are stored in Q6_K."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def tensor_data(spec: SynthSpec, tensor: SynthTensor) -> Iterator[Bytes]:
    """The bytes of a tensor in file order, in chunks; binary32 where the spec expands."""
    if tensor.name == "rope_freqs.weight":
        yield _rope_freqs(spec)
        return
    for name, rows in tensor.parts:
        if len(tensor.shape) == 1:
            yield _vector_values(spec, name, rows).astype("<f4").view(np.uint8)
            continue
        columns = tensor.shape[-1]
        deviation = 1.0 / math.sqrt(columns)
        for blocks in draw_matrix(spec.seed, name, tensor.dtype, rows, columns, deviation):
            if spec.expand_to_f32:
                values = FORMATS[tensor.dtype].dequantize(blocks)
                yield np.ascontiguousarray(values, "<f4").view(np.uint8)
            else:
                yield blocks


def _vector_values(spec: SynthSpec, name: str, width: int) -> np.ndarray:
    bits = random_bits(spec.seed, name)
    if name.endswith(".bias"):
        return normal_like(bits, width, BIAS_DEVIATION)
    return np.float32(1.0) + normal_like(bits, width, NORM_DEVIATION)


def _rope_freqs(spec: SynthSpec) -> Bytes:
    """Divisors of the rotary frequencies in [1, 8), increasing as in published models."""
    pairs = spec.head_dim // 2
    drawn = np.sort(random_bytes(random_bits(spec.seed, "rope_freqs.weight"), pairs))
    step = np.float32((ROPE_FREQS_MAX - 1.0) / 256)
    return (np.float32(1.0) + drawn.astype(np.float32) * step).astype("<f4").view(np.uint8)
