"""RMS_NORM_FUSED_MLP_GATE_UP: normalize once, project to gate and up."""

from __future__ import annotations

from contract.arrays import Floats
from reference.matrix import Matrix
from reference.ops.matmul import matmul
from reference.ops.rms_norm import rms_norm


def rms_norm_fused_mlp_gate_up(
    *, x: Floats, norm_weight: Floats, gate_weight: Matrix, up_weight: Matrix, eps: float
) -> tuple[Floats, Floats]:
    """h = rms_norm(x); returns h gate_weight^T, h up_weight^T."""
    h = rms_norm(x=x, weight=norm_weight, eps=eps)
    return matmul(x=h, weight=gate_weight), matmul(x=h, weight=up_weight)
