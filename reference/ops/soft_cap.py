"""SOFT_CAP: limits activations smoothly to +-cap."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats
from reference.exact.elementary import tanh


def soft_cap(*, x: Floats, cap: float) -> Floats:
    """y = cap * tanh(x / cap) (rule R2)."""
    bound = np.float32(cap)
    return bound * tanh(x / bound)
