"""ADD: elementwise sum of two activations."""

from __future__ import annotations

from contract.arrays import Floats


def add(*, a: Floats, b: Floats) -> Floats:
    """y = a + b (rule R0). Both are [tokens, width]."""
    return a + b
