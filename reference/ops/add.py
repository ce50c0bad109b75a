"""ADD: elementwise sum of two activations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def add(*, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """y = a + b (rule R0). Both are [tokens, width]."""
    return a + b
