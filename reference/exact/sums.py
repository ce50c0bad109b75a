"""Rules R3 and R4: the one order in which a long axis of binary32 values is summed.

An axis is cut at absolute multiples of 256 into segments and of 1024 into spans. The values of a
segment are padded with +0 to 256 and folded in halves. Segment values are added from left to right
within their span, then spans from left to right into the total, both starting from +0. Every
addition is written out elementwise, because ``np.sum`` chooses an order of its own."""

from __future__ import annotations

import numpy as np

from contract.arithmetic import SEGMENT, SPAN
from contract.arrays import Floats


@np.errstate(over="ignore", invalid="ignore")
def fold_segment(products: Floats) -> Floats:
    """R4: sum each segment, f32 [..., n] with n <= 256 -> f32 [...].

    v[0:128] + v[128:256], then halves of 64, 32, ... 1 of the sums."""
    length = products.shape[-1]
    if length > SEGMENT:
        raise ValueError(f"a segment holds at most {SEGMENT} elements, not {length}")
    values = np.zeros((*products.shape[:-1], SEGMENT), np.float32)
    values[..., :length] = products
    half = SEGMENT // 2
    while half:
        values = values[..., :half] + values[..., half:]
        half //= 2
    return values[..., 0]


@np.errstate(over="ignore", invalid="ignore")
def fold_axis(segment_values: Floats) -> Floats:
    """R3: add segment values from left to right into spans, and spans into the total.

    f32 [..., n_segments] -> f32 [...]; an axis without segments sums to +0."""
    per_span = SPAN // SEGMENT
    total = np.zeros(segment_values.shape[:-1], np.float32)
    for first in range(0, segment_values.shape[-1], per_span):
        span = np.zeros_like(total)
        for index in range(first, min(first + per_span, segment_values.shape[-1])):
            span = span + segment_values[..., index]
        total = total + span
    return total


def sum_axis(products: Floats) -> Floats:
    """R3 over R4: the sum of f32[..., K] over its last axis, f32[...]."""
    *others, length = products.shape
    n_segments = -(-length // SEGMENT)
    padded = np.zeros((*others, n_segments * SEGMENT), np.float32)
    padded[..., :length] = products
    return fold_axis(fold_segment(padded.reshape(*others, n_segments, SEGMENT)))
