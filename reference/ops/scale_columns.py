"""SCALE_COLUMNS: multiplies every channel by its factor, or all channels by one factor."""

from __future__ import annotations

from contract.arrays import Floats


def scale_columns(*, x: Floats, factors: Floats) -> Floats:
    """y = x * factors; x is [tokens, width], factors [width] or [1]."""
    return x * factors
