"""Numbers by which a device's own division and square root are judged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAMPLES = 1 << 14

Float32 = NDArray[np.float32]


def sample_pairs() -> tuple[Float32, Float32]:
    """Pairs of positive normal numbers whose quotients are normal, spread over many exponents."""
    rng = np.random.default_rng(20)
    bits = rng.integers(0, 1 << 23, (2, SAMPLES), dtype=np.uint32)
    bits |= rng.integers(127 - 30, 127 + 30, (2, SAMPLES), dtype=np.uint32) << np.uint32(23)
    a, b = bits.view(np.float32)
    return a, b
