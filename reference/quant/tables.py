"""The tables of IQ4_NL, IQ4_XS and MXFP4: the integer that each 4-bit code (nibble) stands for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Bytes, Floats


class Table:
    """Sixteen integers of magnitude up to 127.

    ``values`` int8[16] is indexed by nibble; ``sorted_values`` f32 has each value once, rising."""

    def __init__(self, *values: int) -> None:
        self.values = np.array(values, np.int8)
        distinct, nibbles = np.unique(self.values, return_index=True)
        self._nibbles: Bytes = nibbles.astype(np.uint8)
        self.sorted_values: Floats = distinct.astype(np.float32)
        self._middles = (self.sorted_values[1:] + self.sorted_values[:-1]) / np.float32(2)

    def _nearest_index(self, scaled: Floats) -> NDArray[np.intp]:
        """The index in ``sorted_values`` of the nearest value, the lower of two equally near."""
        return np.searchsorted(self._middles, scaled)

    def nearest(self, scaled: Floats) -> Floats:
        """The nearest value of each element, the lower of two equally near."""
        return self.sorted_values[self._nearest_index(scaled)]

    def nearest_nibble(self, scaled: Floats) -> Bytes:
        """The nibble of the nearest value; of two equal values the one with the lower nibble."""
        return self._nibbles[self._nearest_index(scaled)]


IQ4 = Table(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The table of IQ4_NL and IQ4_XS."""
E2M1 = Table(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The table of MXFP4: twice the numbers of E2M1, which has one sign bit, two exponent bits and one
fraction bit (OCP Microscaling Formats specification 1.0)."""
