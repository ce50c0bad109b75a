"""Launches for products of up to sixteen tokens whose packed activations fit in shared memory.

One launch of ``kernels/unit_spans.cu`` computes all matrices of a run of ``accel.cuda.products``,
after ``unit_pack.cu`` has packed its activations. If whole rows do not fit, blocks share rows
(split K) and write sums of spans, which the next run adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.cuda.device import Device
from accel.cuda.group_shapes import SPAN_UNITS, SUM_BYTES, TOKEN_BYTES, span_count
from accel.cuda.packed_tiles import UNIT_ROWS, unit_bytes, unit_count
from accel.cuda.products import MAX_FORMATS, Run, format_macros, matrix_macros, residual_operand
from accel.cuda.runs import operand_indices, packet_number, size_indices
from accel.cuda.tuned import KernelLaunch
from accel.packets.step import Op
from contract.dtypes import DType

MAX_TOKENS = 16
"""Most tokens; with more a warp computes a unit slower than the device loads it."""
BARRIER_BYTES = 8
TILE_WORDS = 2
"""Counters of a tile whose values wait to be folded."""
MIN_TILE_SLOTS = 2
MAX_TILE_SLOTS = 8
MAX_SLOTS = 4
WHOLE_WARPS, FEW_WARPS = (16, 12), 8
"""Warps of a block with whole rows; few only where no later run folds parts."""
PARTED_WARPS = (12, 16, 8)
"""Warps of a block whose rows several blocks share, tried in this order."""
SPAN_TIME, TOKENS_TIME = 24, 9
"""The time of a warp for a span, and of a block to load the tokens of one, in tenths of a
microsecond on an H200."""


@dataclass(frozen=True, slots=True)
class SpanShape:
    """The shape of a block: warps, units each copies ahead, tiles whose values may wait, blocks
    that share rows, and bytes of shared memory."""

    warps: int
    slots: int
    tile_slots: int
    parts: int
    shared_bytes: int


def span_launch(ops: Sequence[Op], run: Run, device: Device, parted: bool) -> KernelLaunch | None:
    """The products of ``run`` with all that follows them; ``parted`` if the next run folds spans.
    None if nothing fits."""
    products = [ops[index] for index in run.products]
    formats = list(dict.fromkeys(p.dtype for p in products if p.dtype is not None))
    columns, tokens = products[0].max_sizes()["columns"], products[0].count.maximum
    if len(formats) > MAX_FORMATS or tokens > MAX_TOKENS:
        return None
    paired = run.gate is not None
    tiles = sum(-(-product.max_sizes()["rows"] // UNIT_ROWS) for product in products)
    tiles //= 2 if paired else 1
    shape = span_shape(formats, columns, tokens, tiles, paired, device, parted)
    if shape is None:
        return None
    macros = {
        **format_macros(products),
        "WARPS": shape.warps,
        "SLOTS": shape.slots,
        "TILE_SLOTS": shape.tile_slots,
        "EIGHTS": _eights(tokens),
        "PARTS": shape.parts,
        "PRODUCT": run.products[0],
        "GATE": packet_number(run.gate),
        **operand_indices(ops, run.quantize, "m scale sums"),
        **operand_indices(ops, run.residual, f"RESIDUAL={residual_operand(ops, run)}"),
        **size_indices("matmul", "rows", "columns"),
        **size_indices("swiglu", "activation"),
        **matrix_macros(ops, run, range(len(products))),
    }
    grid = (min(tiles, max(1, device.multiprocessors // shape.parts)), shape.parts)
    return KernelLaunch("unit_spans", grid, shape.warps * 32, shape.shared_bytes, macros)


def span_shape(
    formats: Sequence[DType],
    columns: int,
    tokens: int,
    tiles: int,
    paired: bool,
    device: Device,
    parted: bool = False,
) -> SpanShape | None:
    """The fastest shape where rows may be ``parted``, else the one with the most warps for whole
    rows; None if none fits."""
    if not parted:
        warps = (*WHOLE_WARPS, FEW_WARPS)
        fitting = (_shape(formats, columns, tokens, paired, device, 1, one) for one in warps)
        return next((shape for shape in fitting if shape is not None), None)
    spans = span_count(columns)
    shapes = [
        shape
        for parts in range(1, min(spans, device.multiprocessors) + 1)
        for warps in PARTED_WARPS
        if (shape := _shape(formats, columns, tokens, paired, device, parts, warps)) is not None
    ]

    def time(shape: SpanShape) -> int:
        of_part = -(-spans // shape.parts)
        items = -(-tiles // (device.multiprocessors // shape.parts)) * of_part
        return -(-items // shape.warps) * SPAN_TIME + of_part * TOKENS_TIME

    return min(shapes, key=time, default=None)


def _shape(
    formats: Sequence[DType],
    columns: int,
    tokens: int,
    paired: bool,
    device: Device,
    parts: int,
    warps: int,
) -> SpanShape | None:
    """The shape with as many slots as fit, at least two."""
    of_part = -(-span_count(columns) // parts)
    units = min(of_part * SPAN_UNITS, unit_count(columns))
    items = of_part * (2 if paired else 1)
    for slots in range(MAX_SLOTS, 1, -1):
        left = device.shared_bytes - units * 8 * _eights(tokens) * (TOKEN_BYTES + SUM_BYTES + 4)
        left -= warps * slots * (max(map(unit_bytes, formats)) + BARRIER_BYTES)
        left -= of_part * BARRIER_BYTES
        values = items * UNIT_ROWS * 8 * _eights(tokens) * 4 if parts == 1 else 0
        tile_slots = MAX_TILE_SLOTS
        while tile_slots > MIN_TILE_SLOTS and left < tile_slots * (values + 4 * TILE_WORDS):
            tile_slots //= 2
        left -= tile_slots * (values + 4 * TILE_WORDS)
        if left >= 0:
            return SpanShape(warps, slots, tile_slots, parts, device.shared_bytes - left)
    return None


def _eights(tokens: int) -> int:
    return -(-tokens // 8)
