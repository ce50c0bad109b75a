"""MAP_TOKENS: names sampled tokens by another vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1


def map_tokens(*, token: NDArray[np.int32], table: NDArray[np.int32]) -> NDArray[np.int32]:
    """``table[token]``, int32[rows]; -1 stays -1."""
    mapped: NDArray[np.int32] = np.where(token < 0, NO_TOKEN, table[token]).astype(np.int32)
    return mapped
