"""Sample numbers that test a device's division and square root."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats

SAMPLES = 1 << 14


def sample_pairs() -> tuple[Floats, Floats]:
    """Pairs of positive normal numbers whose quotients are normal, spread over many exponents."""
    numbers = _scrambled(2 * SAMPLES).reshape(2, SAMPLES)
    mantissas = (numbers & np.uint64((1 << 23) - 1)).astype(np.uint32)
    exponents = (numbers >> np.uint64(32)) % np.uint64(60) + np.uint64(127 - 30)
    a, b = (mantissas | exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)
    return a, b


def _scrambled(count: int) -> NDArray[np.uint64]:
    """The first ``count`` numbers of SplitMix64 (Steele, Lea and Flood 2014) from seed 0.
    ``numpy.random`` takes longer to import than the whole test."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
