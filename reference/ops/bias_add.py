"""BIAS_ADD: add one vector to every row."""

from __future__ import annotations

from contract.arrays import Floats


def bias_add(*, x: Floats, bias: Floats) -> Floats:
    """y[t] = x[t] + bias (rule R0)."""
    return x + bias
