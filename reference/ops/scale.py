"""SCALE: multiply by a constant."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats


def scale(*, x: Floats, factor: float) -> Floats:
    """y = x * factor, with the factor rounded to binary32 first (rule R0)."""
    return x * np.float32(factor)
