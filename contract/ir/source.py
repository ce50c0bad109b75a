"""The text of ``BufferDecl.source``: which rows of which tensor of the file a weight contains.

- ``blk.0.attn_q.weight`` is a whole tensor.
- ``blk.0.attn_q.weight[0:64/128]`` is rows 0 to 63 of every 128, since files interleave several
  matrices in one tensor by head, by expert or by halves.
- ``blk.0.attn_qkv.weight[0:512/768][0:64/128]`` applies the second slice to the rows of the first.
- ``blk.0.attn_k_norm.weight*2^(0x63,-2x1)`` is 63 binary32 numbers times 2^0 and one times 2^-2.
- ``1*2^(...)`` is a row of the powers themselves, ``1`` a matrix of ones, ``0`` one of zeros; no
  tensor is read."""

from __future__ import annotations

import functools
import re
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats
from contract.lazy_dataclass import dataclass

_SLICE = re.compile(r"\[(\d+):(\d+)/(\d+)\]")
_TEXT = re.compile(
    rf"(?P<tensor>[^\[\]*]+)(?P<slices>(?:{_SLICE.pattern})*)(?:\*2\^\((?P<powers>[-\dx,]+)\))?"
)
_RUN = re.compile(r"(-?\d+)x(\d+)")
KNOWN_SOURCES = 4096
"""The sources parsed last that are kept: opening a model asks for each several times."""
ONES, ZEROS = "1", "0"
"""The tensor names that mean ones and zeros."""
MADE = (ONES, ZEROS)

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows [start, stop) of every ``group`` rows; ``inner`` is a slice of those rows. Raises
    ValueError for no rows, rows outside the group, or rows that are not whole inner groups."""

    start: int
    stop: int
    group: int
    inner: RowSlice | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.group:
            raise ValueError(f"rows [{self.start}, {self.stop}) of {self.group}")
        if self.inner is not None and (self.stop - self.start) % self.inner.group:
            raise ValueError(f"{self.stop - self.start} rows in groups of {self.inner.group}")

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}/{self.group}]{self.inner or ''}"

    def take(self, rows: NDArray[Scalar]) -> NDArray[Scalar]:
        """The rows of an array [n * group, width] that this slice selects, in their order."""
        groups = rows.reshape(-1, self.group, rows.shape[-1])
        selected = groups[:, self.start : self.stop].reshape(-1, rows.shape[-1])
        return selected if self.inner is None else self.inner.take(selected)

    def selected(self) -> list[int]:
        """The row numbers this slice selects of one group."""
        numbers: list[int] = self.take(np.arange(self.group)[:, None]).reshape(-1).tolist()
        return numbers


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A tensor of the model file or a slice of its rows, with columns scaled by powers of two.

    ``powers`` has one exponent per column of a binary32 tensor, or is empty."""

    tensor: str
    rows: RowSlice | None = None
    powers: tuple[int, ...] = ()

    def __str__(self) -> str:
        runs = ",".join(f"{power}x{len(list(run))}" for power, run in groupby(self.powers))
        return f"{self.tensor}{self.rows or ''}{f'*2^({runs})' if runs else ''}"

    def scaled(self, values: Floats) -> Floats:
        """``values`` [..., columns] times the powers of two, which is exact."""
        return values if not self.powers else np.ldexp(values, np.array(self.powers))


@functools.lru_cache(KNOWN_SOURCES)
def parse_source(text: str) -> WeightSource:
    """Parse the text of a source. Raises ValueError for any other text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no tensor")
    rows = None
    for start, stop, group in reversed(_SLICE.findall(found["slices"])):
        rows = RowSlice(int(start), int(stop), int(group), rows)
    powers: list[int] = []
    for power, count in _RUN.findall(found["powers"] or ""):
        powers += [int(power)] * int(count)
    return WeightSource(found["tensor"], rows, tuple(powers))
