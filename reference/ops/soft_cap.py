"""SOFT_CAP: limits activations smoothly to +-cap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import tanh


def soft_cap(*, x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """y = cap * tanh(x / cap) (rule R2)."""
    bound = np.float32(cap)
    return bound * tanh(x / bound)
