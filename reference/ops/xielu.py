"""XIELU: a square above 0, an exponential function below, and a linear part."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats
from reference.exact.elementary import exp


def xielu(*, x: Floats, parameters: Floats) -> Floats:
    """y = (p x) x + b x where x > 0, else ((exp(min(x, e)) - 1) - x) n + b x; ``parameters`` are
    f32[4]: p, n, b, e. NaN stays NaN."""
    p, n, b, e = parameters
    below = (exp(np.where(x > e, e, x)) - np.float32(1.0)) - x
    y: Floats = np.where(x > 0, (p * x) * x, below * n) + b * x
    return y
