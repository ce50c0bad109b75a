"""SCALE: multiply by a constant."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def scale(*, x: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """y = x * factor, with the factor rounded to binary32 first (rule R0)."""
    return x * np.float32(factor)
