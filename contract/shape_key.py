"""The two sizes a graph leaves open, as numbers: of one step, or of a shape bucket."""

from __future__ import annotations

from collections.abc import Mapping

from contract.lazy_dataclass import dataclass

SYMBOLS = ("tokens", "rows")
"""The only symbols a shape in a graph may hold: the fields of a ShapeKey."""

MAX_SIZE = 2**32 - 1
"""Largest value of one field: a key packs into one unsigned 64-bit number."""


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """A step of ``tokens`` query tokens and ``rows`` output rows, whose logits are computed. Raises
    ValueError for a size outside [0, 2^32)."""

    tokens: int
    rows: int

    def __post_init__(self) -> None:
        for name in SYMBOLS:
            value = getattr(self, name)
            if not 0 <= value <= MAX_SIZE:
                raise ValueError(f"{name} is {value}, outside [0, {MAX_SIZE}]")

    def sizes(self) -> Mapping[str, int]:
        """The value of each symbol of a graph's shapes."""
        return {"tokens": self.tokens, "rows": self.rows}

    def pack(self) -> int:
        """The key as one unsigned 64-bit number."""
        return self.tokens << 32 | self.rows

    @staticmethod
    def unpack(packed: int) -> ShapeKey:
        """Inverse of ``pack``."""
        return ShapeKey(packed >> 32, packed & MAX_SIZE)
