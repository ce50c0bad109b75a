"""SWIGLU: the gated activation of a feed-forward block."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats
from reference.exact.elementary import exp, gelu, sigmoid, silu

CLAMPED, RELU = 3, 4
"""Values of ``activation`` for the gate with bounds and for the one that is never negative."""
LIMIT = np.float32(7.0)
STEEPNESS = np.float32(1.702)


def swiglu(*, gate: Floats, up: Floats, activation: int = 0) -> Floats:
    """y = f(gate) * up with f = silu, gelu, sigmoid (rule R2) or relu, or the clamped gate; any
    shape."""
    if activation == CLAMPED:
        return clamped(gate, up)
    if activation == RELU:
        return relu(gate) * up
    return (silu, gelu, sigmoid)[activation](gate) * up


def relu(gate: Floats) -> Floats:
    """+0 where gate <= 0, else the gate; NaN stays NaN."""
    y: Floats = np.where(gate <= 0, np.float32(0.0), gate)
    return y


def clamped(gate: Floats, up: Floats) -> Floats:
    """y = (g / (1 + exp(-(1.702 g)))) * (u + 1) with g = min(gate, 7) and u = up within +-7.

    A comparison with NaN is false, so NaN passes both bounds."""
    g = np.where(gate > LIMIT, LIMIT, gate)
    u = np.where(up > LIMIT, LIMIT, np.where(up < -LIMIT, -LIMIT, up))
    one = np.float32(1.0)
    y: Floats = (g / (one + exp(-(STEEPNESS * g)))) * (u + one)
    return y
