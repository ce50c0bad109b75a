"""Products with many tokens: activations packed once, then a launch for every matrix.

The runs are those of ``accel.cuda.products`` without a gate: ``rms_norm? quantize_activation``, the
products of those integers with their biases, a residual behind a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.cuda.device import Device
from accel.cuda.products import (
    FEW,
    Run,
    aligned_rows,
    held_units,
    is_private,
    residual_operand,
    runs,
    writer,
)
from accel.cuda.runs import operand_place, packet_number, size_places
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.cuda.units import UNIT_ROWS, unit_bytes, unit_count
from accel.packets.step import Op
from contract.dtypes import Q4_K, Q5_K, Q6_K, DType

FORMATS = (Q4_K, Q5_K, Q6_K)
WARPS = 8
BLOCK_ROWS = WARPS * UNIT_ROWS
BLOCK_TOKENS = 64
STAGES = 2
TOKEN_BYTES = 512
"""Of a unit: two planes."""
SUM_BYTES = 32
MOST_PACKING_BLOCKS = 1 << 12

GROUP_CAPABILITY = (9, 0)
"""The one with products of four warps."""
GROUP_WARPS = 4
GROUP_ROWS = GROUP_WARPS * UNIT_ROWS
SINGLE_WARP_FORMATS = (Q6_K,)
"""Sub-blocks of 16 columns: products of four warps are of 32, half of them zeros."""
MOST_SPLIT_TOKENS = 64
"""With so many tokens there are too few blocks unless the columns are split among groups."""
BARRIER_BYTES = 8


def matrix_rule(ops: Remaining, device: Device) -> Replacement | None:
    """The longest run of many tokens the ops begin with."""
    for run in runs(ops):
        if run.quantize is None or run.gate is not None:
            continue
        products = [ops[place] for place in run.products]
        if products[0].count.most <= FEW or any(p.dtype not in FORMATS for p in products):
            continue
        if aligned_rows(ops, run) and is_private(ops, run):
            launches = [_pack(ops, run)]
            launches += [_product(ops, run, number, device) for number in range(len(products))]
            return Replacement(run.length, tuple(launches))
    return None


def shared_bytes(dtype: DType) -> int:
    """Two stages of what a block reads of one unit."""
    tokens = BLOCK_TOKENS * (TOKEN_BYTES + SUM_BYTES + 4)
    return STAGES * (tokens + WARPS * unit_bytes(dtype))


def _pack(ops: Sequence[Op], run: Run) -> KernelLaunch:
    assert run.quantize is not None
    quantize = ops[run.quantize]
    tokens, columns = quantize.count.most, quantize.most_sizes()["columns"]
    first = run.quantize if run.norm is None else run.norm
    return KernelLaunch(
        "unit_pack.cu",
        "unit_pack",
        (min(tokens, MOST_PACKING_BLOCKS), 1, 1),
        (WARPS * 32, 1, 1),
        4 * unit_count(columns),
        {
            "WARPS": WARPS,
            "HELD_UNITS": held_units(run, unit_count(columns), WARPS),
            "X": operand_place(ops, first, "x"),
            "NORM_WEIGHT": operand_place(ops, run.norm, "weight"),
            "M": operand_place(ops, run.quantize, "m"),
            "SCALE": operand_place(ops, run.quantize, "scale"),
            "SUMS": operand_place(ops, run.quantize, "sums"),
            "NORM": packet_number(run.norm),
            "QUANTIZE": run.quantize,
            **size_places("quantize_activation", "columns"),
            **size_places("rms_norm", "eps"),
        },
    )


def _product(ops: Sequence[Op], run: Run, number: int, device: Device) -> KernelLaunch:
    """By groups of four warps where there are such products and they are faster."""
    product = ops[run.products[number]]
    many = product.count.most > MOST_SPLIT_TOKENS
    if device.capability == GROUP_CAPABILITY and not (
        many and product.dtype in SINGLE_WARP_FORMATS
    ):
        return _grouped(ops, run, number, device)
    return _single(ops, run, number)


def _single(ops: Sequence[Op], run: Run, number: int) -> KernelLaunch:
    """By single warps, on any device."""
    product = ops[run.products[number]]
    rows = product.most_sizes()["rows"]
    assert product.dtype is not None
    return KernelLaunch(
        "unit_matrix.cu",
        "unit_matrix",
        (-(-rows // BLOCK_ROWS), -(-product.count.most // BLOCK_TOKENS), 1),
        (WARPS * 32, 1, 1),
        shared_bytes(product.dtype),
        _places(ops, run, number),
    )


def _grouped(ops: Sequence[Op], run: Run, number: int, device: Device) -> KernelLaunch:
    """By groups of four warps."""
    product = ops[run.products[number]]
    rows, tokens = product.most_sizes()["rows"], product.count.most
    assert product.dtype is not None
    shape = _group_shape(product.dtype, tokens, device)
    return KernelLaunch(
        "unit_groups.cu",
        "unit_groups",
        (-(-rows // shape.rows), -(-tokens // shape.tokens), 1),
        (shape.groups * GROUP_WARPS * 32, 1, 1),
        shape.shared_bytes(product.dtype),
        {
            "WARP_GROUPS": shape.groups,
            "BLOCK_TOKENS": shape.tokens,
            "SPLIT": int(shape.split),
            "STAGES": shape.stages,
            **_places(ops, run, number),
        },
    )


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Groups of a block, tokens it takes and stages of what is read of a unit, by a block or by
    each of the groups that are ``split``: they share rows and split the columns."""

    groups: int
    tokens: int
    split: bool
    stages: int = 2

    @property
    def rows(self) -> int:
        """Of a block."""
        return GROUP_ROWS * (1 if self.split else self.groups)

    def shared_bytes(self, dtype: DType) -> int:
        """Stages with their barriers; totals of a block whose groups have rows of their own."""
        of_tokens = self.tokens * (TOKEN_BYTES + SUM_BYTES + 4)
        stage = of_tokens + self.rows // UNIT_ROWS * unit_bytes(dtype) + BARRIER_BYTES
        stages = self.stages * stage
        return stages * self.groups if self.split else stages + 4 * self.rows * self.tokens


SPLIT_SHAPES = (
    GroupShape(4, 32, True),
    GroupShape(4, 16, True, 3),
    GroupShape(4, 16, True),
)
WHOLE_SHAPES = (GroupShape(4, 64, False), GroupShape(3, 64, False), GroupShape(2, 64, False))


def _group_shape(dtype: DType, tokens: int, device: Device) -> GroupShape:
    """The first that fits; few tokens take no more than they need."""
    shapes: tuple[GroupShape, ...] = WHOLE_SHAPES
    if tokens <= MOST_SPLIT_TOKENS:
        shapes = SPLIT_SHAPES if tokens > SPLIT_SHAPES[-1].tokens else SPLIT_SHAPES[1:]
    return next(shape for shape in shapes if shape.shared_bytes(dtype) <= device.shared_bytes)


def _places(ops: Sequence[Op], run: Run, number: int) -> dict[str, int]:
    product = ops[run.products[number]]
    end = run.residual if run.residual is not None else writer(run, number)
    assert product.dtype is not None
    return {
        "FORMAT_ID": product.dtype.ggml_id,
        "PRODUCT": run.products[number],
        "M": operand_place(ops, run.quantize, "m"),
        "SCALE": operand_place(ops, run.quantize, "scale"),
        "SUMS": operand_place(ops, run.quantize, "sums"),
        "W": operand_place(ops, run.products[number], "weight"),
        "B": operand_place(ops, run.biases[number], "bias"),
        "Y": operand_place(ops, end, "y"),
        "RESIDUAL": operand_place(ops, run.residual, residual_operand(ops, run)),
        **size_places("matmul", "rows", "columns"),
    }
