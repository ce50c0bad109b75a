"""RMS_NORM_FUSED_QKV: normalize once, project to queries, keys and values."""

from __future__ import annotations

from contract.arrays import Floats
from reference.matrix import Matrix
from reference.ops.matmul import matmul
from reference.ops.rms_norm import rms_norm


def rms_norm_fused_qkv(
    *,
    x: Floats,
    norm_weight: Floats,
    q_weight: Matrix,
    k_weight: Matrix,
    v_weight: Matrix,
    eps: float,
) -> tuple[Floats, Floats, Floats]:
    """h = rms_norm(x); returns h q_weight^T, h k_weight^T, h v_weight^T."""
    h = rms_norm(x=x, weight=norm_weight, eps=eps)
    return matmul(x=h, weight=q_weight), matmul(x=h, weight=k_weight), matmul(x=h, weight=v_weight)
