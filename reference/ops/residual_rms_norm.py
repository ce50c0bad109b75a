"""RESIDUAL_RMS_NORM: adds to the residual stream, then normalizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.ops.rms_norm import rms_norm


def residual_rms_norm(
    *,
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    norm_weight: NDArray[np.float32],
    eps: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """sum = residual + x; y = rms_norm(sum). Returns (sum, y), both [tokens, hidden]."""
    total = residual + x
    return total, rms_norm(x=total, weight=norm_weight, eps=eps)
