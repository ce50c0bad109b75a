"""The sizes that a graph leaves open: those of one step, or the most of a form of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SYMBOLS = ("tokens", "rows")
"""The only symbols a shape in a graph may hold: the fields of a ShapeKey."""

MAX_SIZE = 2**32 - 1
"""Largest value of one field: a key packs into one unsigned 64-bit number."""


@dataclass(frozen=True, slots=True, order=True)
class ShapeKey:
    """``tokens`` query tokens, of which ``rows`` want logits.

    Raises ValueError for a size outside [0, 2^32).
    """

    tokens: int
    rows: int

    def __post_init__(self) -> None:
        for name in SYMBOLS:
            value = getattr(self, name)
            if not 0 <= value <= MAX_SIZE:
                raise ValueError(f"{name} is {value}, outside [0, {MAX_SIZE}]")

    def sizes(self) -> Mapping[str, int]:
        """The values of the symbols in a graph's shapes."""
        return {"tokens": self.tokens, "rows": self.rows}

    def pack(self) -> int:
        """The key as one unsigned 64-bit number."""
        return self.tokens << 32 | self.rows

    @staticmethod
    def unpack(packed: int) -> ShapeKey:
        """Inverse of ``pack``."""
        return ShapeKey(packed >> 32, packed & MAX_SIZE)
