"""MOE_SWIGLU: the gated activation of the experts."""

from __future__ import annotations

from contract.arrays import Floats
from reference.ops.swiglu import swiglu


def moe_swiglu(*, gate: Floats, up: Floats, activation: int = 0) -> Floats:
    """y of ``swiglu``, [tokens, used, width] (rule R2)."""
    return swiglu(gate=gate, up=up, activation=activation)
