"""SCALE_COLUMNS: a factor for every channel, or one for all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def scale_columns(*, x: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """y = x * factors; x is [tokens, width], factors [width] or [1]."""
    return x * factors
