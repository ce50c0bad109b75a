"""BIAS_ADD: add one vector to every row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bias_add(*, x: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """y[t] = x[t] + bias (rule R0)."""
    return x + bias
