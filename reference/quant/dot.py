"""The definition of a matrix product (rules R3, R4 and R5): readable, not fast.

For each token t and each matrix row r the order of operations is:

- float formats: products w[r, k] * x[t, k] are rounded, then summed by R3 over R4;
- 32-blocks: t_b = d_b * float(sum q*m) (+ mn_b * float(sum m)), each operation rounded, and
  segment = (left fold of t_b from +0) * scale, blocks that do not exist being left out;
- super-blocks: J = sum_sub sc * (sum q*m), P = sum_sub mn * (sum m) in int32, and
  segment = (d * float(J) - dmin * float(P)) * scale;

with m and scale of :mod:`reference.exact.activation`; segments are folded by R3."""

from __future__ import annotations

from functools import partial

import numpy as np

from contract.arithmetic import SEGMENT
from contract.arrays import Bytes, Floats, Ints
from contract.dtypes import DType
from reference.exact.activation import quantize_activation
from reference.exact.sums import fold_axis, sum_axis
from reference.quant import FORMATS
from reference.quant.formats import Blocks32, SuperBlocks


@np.errstate(over="ignore", invalid="ignore")
def matmul(blocks: Bytes, dtype: DType, x: Floats) -> Floats:
    """x @ W.T in exact arithmetic: W uint8[rows, row_bytes], x f32[T, K] -> f32[T, rows]."""
    planes = FORMATS[dtype].unpack(blocks)
    if isinstance(planes, Blocks32):
        segments_of = partial(_blocks32_segments, planes)
    elif isinstance(planes, SuperBlocks):
        segments_of = partial(_super_block_segments, planes)
    else:
        return _float_matmul(planes, x)
    activation = quantize_activation(x)
    out = np.empty((len(x), len(blocks)), np.float32)
    for token in range(len(x)):
        out[token] = fold_axis(segments_of(activation.m[token]) * activation.scale[token])
    return out


def _float_matmul(weights: Floats, x: Floats) -> Floats:
    out = np.empty((len(x), len(weights)), np.float32)
    for token, row in enumerate(x):
        out[token] = sum_axis(weights * row)
    return out


def _blocks32_segments(planes: Blocks32, m: Ints) -> Floats:
    """Segment values before the activation scale, f32[rows, n_segments], for m int32[K]."""
    rows, n_blocks = planes.scale.shape
    m = m.reshape(n_blocks, 32)
    q = planes.q.reshape(rows, n_blocks, 32).astype(np.int32)
    terms = planes.scale * (q * m).sum(axis=-1, dtype=np.int32).astype(np.float32)
    if planes.minimum is not None:
        terms = terms + planes.minimum * m.sum(axis=-1, dtype=np.int32).astype(np.float32)
    per_segment = SEGMENT // 32
    segments = np.zeros((rows, -(-n_blocks // per_segment)), np.float32)
    for block in range(n_blocks):
        segment = block // per_segment
        segments[:, segment] = segments[:, segment] + terms[:, block]
    return segments


def _super_block_segments(planes: SuperBlocks, m: Ints) -> Floats:
    """Segment values before the activation scale, f32[rows, n_segments], for m int32[K]."""
    rows, n_segments = planes.scale.shape
    m = m.reshape(n_segments, -1, planes.sub_elements)
    q = planes.q.reshape(rows, *m.shape).astype(np.int32)
    sub_scale = planes.sub_scale.reshape(rows, n_segments, -1).astype(np.int32)
    sub_sums = (q * m).sum(axis=-1, dtype=np.int32)
    j = (sub_scale * sub_sums).sum(axis=-1, dtype=np.int32)
    values: Floats = planes.scale * j.astype(np.float32)
    if planes.minimum is not None and planes.sub_minimum is not None:
        sub_minimum = planes.sub_minimum.reshape(rows, n_segments, -1).astype(np.int32)
        p = (sub_minimum * m.sum(axis=-1, dtype=np.int32)).sum(axis=-1, dtype=np.int32)
        values = values - planes.minimum * p.astype(np.float32)
    return values
