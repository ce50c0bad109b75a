"""RESIDUAL_RMS_NORM: adds to the residual stream, then normalizes."""

from __future__ import annotations

from contract.arrays import Floats
from reference.ops.rms_norm import rms_norm


def residual_rms_norm(
    *, x: Floats, residual: Floats, norm_weight: Floats, eps: float
) -> tuple[Floats, Floats]:
    """sum = residual + x; y = rms_norm(sum). Returns (sum, y), both [tokens, hidden]."""
    total = residual + x
    return total, rms_norm(x=total, weight=norm_weight, eps=eps)
