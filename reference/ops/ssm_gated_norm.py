"""SSM_GATED_NORM: the norm and output gate of a delta-net layer."""

from __future__ import annotations

from contract.arrays import Floats
from reference.exact.elementary import silu
from reference.ops.rms_norm import rms_norm


def ssm_gated_norm(*, x: Floats, gate: Floats, weight: Floats, eps: float, heads: int) -> Floats:
    """y = rms_norm(x, weight) * silu(gate), per head (rule R4).

    x, gate and the result are [tokens, heads * width], weight [width]."""
    return rms_norm(x=x, weight=weight, eps=eps, groups=heads) * silu(gate)
