"""MAP_TOKENS: names sampled tokens by another vocabulary."""

from __future__ import annotations

import numpy as np

from contract.arrays import Ints

NO_TOKEN = -1


def map_tokens(*, token: Ints, table: Ints) -> Ints:
    """``table[token]``, int32[rows]; -1 stays -1."""
    mapped: Ints = np.where(token < 0, NO_TOKEN, table[token]).astype(np.int32)
    return mapped
