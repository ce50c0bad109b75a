"""Equality of two arrays under rule R0, and the first element that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.validate.compare import bit_pattern


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element that differs.

    Numbers are written as Python writes them, bit patterns in hexadecimal. When shapes or types
    differ there is no element to name, and only ``note`` is set."""

    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    expected_bits: str = ""
    got_bits: str = ""
    differing: int = 0
    elements: int = 0
    note: str = ""

    def __str__(self) -> str:
        return self.note or (
            f"{self.differing} of {self.elements} differ, first {self.index}: "
            f"{self.got} (0x{self.got_bits}) not {self.expected} (0x{self.expected_bits})"
        )


def difference(expected: NDArray[Any], got: NDArray[Any], *, may_break: bool) -> Difference | None:
    """The first difference, None when all elements are equal (-0 equals +0).

    NaN equals NaN only if ``may_break`` says that a NaN can be a correct result."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        found = f"{got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}"
        return Difference(note=found)
    same = got == expected
    if may_break and got.dtype.kind == "f":
        same |= np.isnan(got) & np.isnan(expected)
    if same.all():
        return None
    index = tuple(int(i) for i in np.argwhere(~same)[0])
    return Difference(
        index=index,
        expected=str(expected[index]),
        got=str(got[index]),
        expected_bits=bit_pattern(expected[index]),
        got_bits=bit_pattern(got[index]),
        differing=int((~same).sum()),
        elements=same.size,
    )
