"""Weights of the CPU tier: stored blocks, unpacked once into tiles of output rows.

A tile holds its part of the matrix transposed, ``[K, tile rows]``, as int8 (32-blocks: q), int16
(super-blocks: sub_scale * q) or binary32 (float formats), and converts a cache-sized part of it to
binary32 before each use. Reading and converting int8 takes no longer than reading binary32 from
memory (4.6 billion weights per second on two cores either way), needs a quarter of the memory, and
is prepared in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from contract.arithmetic import SEGMENT
from contract.arrays import Array, Bytes, Floats
from contract.dtypes import DType, StorageClass
from reference.cpu.threads import for_each
from reference.quant import FORMATS
from reference.quant.formats import Blocks32, SuperBlocks

TILE_ROWS = 768
"""Output rows of a tile: few numpy calls for a token, and short enough for the cache."""
FLOAT_TILE_ROWS = 256
"""Output rows of a tile of float formats, whose kernel holds 256 products for every row."""
MIN_TILE_ROWS = 96
"""Fewest output rows of a tile when a matrix is split only to use a second thread."""
DIGIT_MAX = 32
"""Largest magnitude of a radix-64 digit of a quantized activation (2047 = 32*64 - 1)."""


def no_scales() -> Floats:
    """An empty array, for a format without these scales."""
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Scales:
    """The binary32 scales of some output rows R; empty arrays if the format has none.

    32-blocks: ``scale`` and ``minimum`` [8, n_segments, 1, R], see :func:`by_address`.
    Super-blocks: ``scale`` and ``minimum`` [n_segments, 1, R], ``sub_minimum`` [n_segments,
    sub-blocks, R]."""

    scale: Floats = field(default_factory=no_scales)
    minimum: Floats = field(default_factory=no_scales)
    sub_minimum: Floats = field(default_factory=no_scales)

    @property
    def parts(self) -> tuple[Floats, Floats, Floats]:
        """The three arrays of scales."""
        return self.scale, self.minimum, self.sub_minimum

    @property
    def nbytes(self) -> int:
        """Bytes of the scales."""
        return sum(part.nbytes for part in self.parts)

    def of_rows(self, first: int, last: int) -> Scales:
        """Views of the scales of rows first .. last - 1."""
        return Scales(*(part[..., first:last] for part in self.parts))

    @staticmethod
    def join(ranges: Sequence[Scales]) -> Scales:
        """The scales of consecutive row ranges as one."""
        columns = zip(*(scales.parts for scales in ranges), strict=True)
        return Scales(*(np.concatenate(column, axis=-1) for column in columns))


@dataclass(frozen=True, slots=True)
class RowTile:
    """Output rows ``first .. first + plane.shape[1]`` of a weight: ``plane`` [K, R] and scales.

    ``wide`` is True when digit sums of this super-block tile may exceed 2^24."""

    first: int
    plane: Array
    scales: Scales = field(default_factory=Scales)
    wide: bool = False

    @property
    def last(self) -> int:
        """One past the last output row."""
        return self.first + int(self.plane.shape[1])

    def first_rows(self, rows: int) -> RowTile:
        """The tile without what is behind the first ``rows`` rows of the matrix."""
        left = max(0, rows - self.first)
        return replace(self, plane=self.plane[:, :left], scales=self.scales.of_rows(0, left))


@dataclass(frozen=True, slots=True)
class PreparedWeight:
    """A matrix W[rows, columns] ready for :func:`reference.cpu.matmul.prepared_matmul`.

    ``scales`` holds those of all rows; the tiles' scales are views of it."""

    dtype: DType
    rows: int
    columns: int
    tiles: tuple[RowTile, ...]
    scales: Scales

    def first_rows(self, rows: int) -> PreparedWeight:
        """Views of the first ``rows`` rows."""
        tiles = tuple(tile.first_rows(rows) for tile in self.tiles if tile.first < rows)
        scales = self.scales.of_rows(0, rows)
        return replace(self, rows=rows, tiles=tiles, scales=scales)

    @property
    def wide(self) -> bool:
        """Whether some tile needs binary64."""
        return any(tile.wide for tile in self.tiles)

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles; the stored blocks are no longer needed."""
        return sum(tile.plane.nbytes for tile in self.tiles) + self.scales.nbytes


def prepare_weight(dtype: DType, blocks: Bytes, threads: int | None = None) -> PreparedWeight:
    """Unpack uint8[rows, row_bytes]; each byte is read once.

    It uses at most ``threads`` threads, None for all cores."""
    rows, row_bytes = blocks.shape
    step = _tile_rows(rows, dtype.storage)
    firsts = range(0, rows, step)
    tiles: dict[int, RowTile] = {}

    def unpack_tile(first: int) -> None:
        tiles[first] = _prepare_tile(dtype, blocks[first : first + step], first)

    for_each(unpack_tile, firsts, threads)
    columns = row_bytes // dtype.block_bytes * dtype.block_elements
    scales = Scales.join([tiles[first].scales for first in firsts] or [Scales()])
    in_order = (tiles[first] for first in firsts)
    shared = tuple(replace(t, scales=scales.of_rows(t.first, t.last)) for t in in_order)
    return PreparedWeight(dtype, rows, columns, shared, scales)


def prepared_bytes(dtype: DType, rows: int, columns: int) -> int:
    """The bytes of a prepared matrix of this size: ``rows`` times those of one row."""
    row = np.zeros((1, dtype.row_bytes(columns)), np.uint8)
    return rows * prepare_weight(dtype, row).nbytes


def _tile_rows(rows: int, storage: StorageClass) -> int:
    limit = FLOAT_TILE_ROWS if storage is StorageClass.FLOAT else TILE_ROWS
    count = max(1, -(-rows // limit))
    if count % 2 and rows >= 2 * MIN_TILE_ROWS:
        count += 1
    return max(16, -(-rows // count // 16) * 16)


def _prepare_tile(dtype: DType, blocks: Bytes, first: int) -> RowTile:
    planes = FORMATS[dtype].unpack(blocks)
    if isinstance(planes, Blocks32):
        scale = by_address(planes.scale.T)[:, :, None]
        minimum = no_scales()
        if planes.minimum is not None:
            minimum = by_address(planes.minimum.T)[:, :, None]
        return RowTile(first, _transpose(planes.q), Scales(scale, minimum))
    if isinstance(planes, SuperBlocks):
        return _prepare_super_blocks(planes, first)
    return RowTile(first, _transpose(planes))


def _prepare_super_blocks(planes: SuperBlocks, first: int) -> RowTile:
    rows, columns = planes.q.shape
    scaled = planes.q.reshape(rows, -1, planes.sub_elements) * planes.sub_scale[..., None]
    scaled = scaled.reshape(rows, columns)
    minimum = sub_minimum = no_scales()
    if planes.minimum is not None and planes.sub_minimum is not None:
        minimum = _transpose(planes.minimum)[:, None]
        sub_minimum = _transpose(planes.sub_minimum.astype(np.float32))
        sub_minimum = sub_minimum.reshape(columns // SEGMENT, -1, rows)
    magnitudes = np.abs(scaled).reshape(rows, -1, SEGMENT).sum(axis=-1, dtype=np.int32)
    return RowTile(
        first,
        _transpose(scaled),
        Scales(_transpose(planes.scale)[:, None], minimum, sub_minimum),
        wide=int(magnitudes.max()) * DIGIT_MAX > 1 << 24,
    )


def by_address(blocks: Array) -> Floats:
    """Per-block values [n_blocks, n] as f32[8, n_segments, n], 0 if a segment has no block.

    The first axis is the block's index in its segment, so the terms that rule R5 adds one after the
    other are contiguous arrays."""
    n_segments = -(-len(blocks) // (SEGMENT // 32))
    padded = np.zeros((n_segments * (SEGMENT // 32), blocks.shape[1]), np.float32)
    padded[: len(blocks)] = blocks
    return np.ascontiguousarray(padded.reshape(n_segments, SEGMENT // 32, -1).swapaxes(0, 1))


def _transpose(matrix: Array) -> Array:
    return np.ascontiguousarray(matrix.T)
