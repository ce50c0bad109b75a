"""MOE_SWIGLU: the gated activation of the experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.ops.swiglu import swiglu


def moe_swiglu(
    *, gate: NDArray[np.float32], up: NDArray[np.float32], activation: int = 0
) -> NDArray[np.float32]:
    """y of ``swiglu``, [tokens, used, width] (rule R2)."""
    return swiglu(gate=gate, up=up, activation=activation)
