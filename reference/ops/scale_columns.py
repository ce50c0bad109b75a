"""SCALE_COLUMNS: multiplies every channel by its factor, or all channels by one factor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def scale_columns(*, x: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """y = x * factors; x is [tokens, width], factors [width] or [1]."""
    return x * factors
