"""SWIGLU: the gated activation of a feed-forward block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import gelu as gelu_function
from reference.exact.elementary import silu


def swiglu(
    *, gate: NDArray[np.float32], up: NDArray[np.float32], gelu: int = 0
) -> NDArray[np.float32]:
    """y = silu(gate) * up, or gelu(gate) * up when ``gelu`` is 1 (rule R2)."""
    return (gelu_function(gate) if gelu else silu(gate)) * up
