"""RMS_NORM_FUSED_QKV: normalize once, project to queries, keys and values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.matrix import Matrix
from reference.ops.matmul import matmul
from reference.ops.rms_norm import rms_norm


def rms_norm_fused_qkv(
    *,
    x: NDArray[np.float32],
    norm_weight: NDArray[np.float32],
    q_weight: Matrix,
    k_weight: Matrix,
    v_weight: Matrix,
    eps: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """h = rms_norm(x); returns h q_weight^T, h k_weight^T, h v_weight^T."""
    h = rms_norm(x=x, weight=norm_weight, eps=eps)
    return matmul(x=h, weight=q_weight), matmul(x=h, weight=k_weight), matmul(x=h, weight=v_weight)
