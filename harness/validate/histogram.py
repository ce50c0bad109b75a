"""Histograms of the sign and exponent of hidden-state elements, accumulated over steps."""

import hashlib
from typing import Any

import numpy as np

from contract.arrays import Floats
from contract.dtypes import F32

BINS = 512
"""One bin for every value of a binary32's sign and exponent bits."""
BARS = " ▁▂▃▄▅▆▇█"
NON_FINITE = 255
"""The biased exponent of infinity and NaN."""
BIAS = 127


class ValueHistogram:
    """Counts of values by sign and exponent, with their extremes, mean magnitude and digest."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.minimum = np.inf
        self.maximum = -np.inf
        self._magnitude = 0.0
        self._digest = hashlib.sha256()

    def add(self, values: Floats) -> None:
        """Add one step's values, of any shape."""
        if values.dtype != np.float32:
            raise ValueError(f"a hidden state is {F32}, not {values.dtype}")
        values = np.ascontiguousarray(values + np.float32(0.0), "<f4")
        self._digest.update(values.tobytes())
        self.counts += np.bincount(values.reshape(-1).view("<u4") >> 23, minlength=BINS)
        self.minimum = min(self.minimum, float(values.min()))
        self.maximum = max(self.maximum, float(values.max()))
        self._magnitude += float(np.abs(values.astype(np.float64)).sum())

    @property
    def elements(self) -> int:
        """The number of elements added."""
        return int(self.counts.sum())

    @property
    def mean_magnitude(self) -> float:
        """Mean of the absolute values."""
        return self._magnitude / max(1, self.elements)

    @property
    def digest(self) -> str:
        """SHA-256 of all elements in order, as little-endian binary32,
        with -0 as +0."""
        return self._digest.hexdigest()

    def bins(self) -> dict[str, int]:
        """Non-empty bins by name: ``-2^3`` counts (-16, -8]; ``0`` includes subnormals."""
        named: dict[str, int] = {}
        for number in np.flatnonzero(self.counts):
            sign, exponent = "-" if number >> 8 else "+", int(number & 255)
            if exponent == 0:
                name = "0"
            elif exponent == NON_FINITE:
                name = f"{sign}non-finite"
            else:
                name = f"{sign}2^{exponent - BIAS}"
            named[name] = named.get(name, 0) + int(self.counts[number])
        return named

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "elements": self.elements,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "mean_magnitude": self.mean_magnitude,
            "digest": self.digest,
            "bins": self.bins(),
        }

    def line(self) -> str:
        """A line of text: extremes, mean magnitude, and bars of both signs over the exponents."""
        both = self.counts[:256] + self.counts[256:]
        used = np.flatnonzero(both[1:NON_FINITE]) + 1
        bars, span = "", "no finite values"
        if len(used):
            low, high = int(used[0]), int(used[-1])
            levels = np.ceil(both[low : high + 1] / both[low : high + 1].max() * (len(BARS) - 1))
            bars = "".join(BARS[int(level)] for level in levels)
            span = f"2^{low - BIAS}..2^{high - BIAS}"
        return (
            f"min {self.minimum:<11.5g} max {self.maximum:<11.5g} "
            f"mean|x| {self.mean_magnitude:<10.5g} {span:<14} {bars}"
        )
