"""SWIGLU: the gated activation of a feed-forward block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import gelu, sigmoid, silu


def swiglu(
    *, gate: NDArray[np.float32], up: NDArray[np.float32], activation: int = 0
) -> NDArray[np.float32]:
    """y = f(gate) * up with f = silu, gelu or sigmoid (rule R2); any shape."""
    return (silu, gelu, sigmoid)[activation](gate) * up
