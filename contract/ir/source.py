"""Which rows of which tensor of the model file a weight buffer holds, as ``BufferDecl.source``.

``blk.0.attn_q.weight`` is a whole tensor. ``blk.0.attn_q.weight[0:64/128]`` is rows 0 to 63 of
every 128: how files interleave several matrices in one, by head, by expert or by halves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TEXT = re.compile(r"(?P<tensor>[^\[\]]+)(?:\[(?P<start>\d+):(?P<stop>\d+)/(?P<group>\d+)\])?")


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows [start, stop) of every ``group`` rows."""

    start: int
    stop: int
    group: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.group:
            raise ValueError(f"rows [{self.start}, {self.stop}) of {self.group}")

    def take(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rows of uint8[n * group, row_bytes] this slice keeps, in their order."""
        groups = rows.reshape(-1, self.group, rows.shape[-1])
        return groups[:, self.start : self.stop].reshape(-1, rows.shape[-1])


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A tensor of the model file, or a slice of its rows."""

    tensor: str
    rows: RowSlice | None = None

    def __str__(self) -> str:
        if self.rows is None:
            return self.tensor
        return f"{self.tensor}[{self.rows.start}:{self.rows.stop}/{self.rows.group}]"


def parse_source(text: str) -> WeightSource:
    """The inverse of ``str``. Raises ValueError for text that is no source."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no tensor")
    if found["group"] is None:
        return WeightSource(text)
    return WeightSource(
        found["tensor"], RowSlice(int(found["start"]), int(found["stop"]), int(found["group"]))
    )
