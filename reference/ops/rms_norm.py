"""RMS_NORM: root-mean-square normalization of whole rows or of each head."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats
from reference.exact.sums import sum_axis

ONE = np.float32(1.0)


def rms_norm(*, x: Floats, eps: float, weight: Floats | None = None, groups: int = 1) -> Floats:
    """r = 1 / sqrt(sum(x x) / width + eps); y = (x r) weight, in each of ``groups``; the sum is by
    rules R3 and R4.

    ``x`` is float32[tokens, groups * width]; ``weight`` is float32[width], or None for ones.
    Returns ``y``, of the shape of ``x``."""
    width = x.shape[-1] // groups
    heads = x.reshape(len(x), groups, width)
    mean = sum_axis(heads * heads) / np.float32(width)
    r = ONE / np.sqrt(mean + np.float32(eps))
    y: Floats = heads * r[..., None]
    if weight is not None:
        y = y * weight
    return y.reshape(x.shape)
