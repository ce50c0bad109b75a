"""Products with many tokens: activations packed once, then the products.

The runs are those of ``accel.cuda.products``: ``rms_norm? quantize_activation``, the products of
those integers with their biases, a gate behind a pair or a residual behind a single one. Where
there are products of warp groups, matrices of one format share a launch; else each has its own, and
a gate is left to the plain kernel.
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
FOUR_SUM_FORMATS = (Q6_K,)
FOUR_SUM_GROUPS = 2
"""Of a block, for which there are registers when four sums are under way at once."""
MOST_SPLIT_TOKENS = 64
"""With more tokens there are blocks enough without splitting columns among groups."""
BARRIER_BYTES = 8


def matrix_rule(ops: Remaining, device: Device) -> Replacement | None:
    """The longest run of many tokens the ops begin with."""
    for run in runs(ops):
        products = [ops[place] for place in run.products]
        if run.quantize is None or products[0].count.most <= FEW:
            continue
        if any(product.dtype not in FORMATS for product in products):
            continue
        if run.gate is not None and not _has_groups(device):
            continue
        if aligned_rows(ops, run) and is_private(ops, run):
            launches = [_pack(ops, run)]
            launches += [
                _product(ops, run, numbers, device) for numbers in _shared(products, device)
            ]
            return Replacement(run.length, tuple(launches))
    return None


def _has_groups(device: Device) -> bool:
    return device.capability == GROUP_CAPABILITY


def _shared(products: Sequence[Op], device: Device) -> list[tuple[int, ...]]:
    """Numbers of the products of each launch."""
    found: list[tuple[int, ...]] = []
    for number, product in enumerate(products):
        before = products[found[-1][0]] if found else None
        if before is not None and before.dtype == product.dtype and _has_groups(device):
            found[-1] = (*found[-1], number)
        else:
            found.append((number,))
    return found


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


def _product(ops: Sequence[Op], run: Run, numbers: tuple[int, ...], device: Device) -> KernelLaunch:
    """One launch of the products ``numbers``."""
    if _has_groups(device):
        return _grouped(ops, run, numbers, device)
    (number,) = numbers
    return _single(ops, run, number)


def _single(ops: Sequence[Op], run: Run, number: int) -> KernelLaunch:
    """By single warps, on any device."""
    product = ops[run.products[number]]
    rows = product.most_sizes()["rows"]
    assert product.dtype is not None
    end = run.residual if run.residual is not None else writer(run, number)
    return KernelLaunch(
        "unit_matrix.cu",
        "unit_matrix",
        (-(-rows // BLOCK_ROWS), -(-product.count.most // BLOCK_TOKENS), 1),
        (WARPS * 32, 1, 1),
        shared_bytes(product.dtype),
        {
            "W": operand_place(ops, run.products[number], "weight"),
            "B": operand_place(ops, run.biases[number], "bias"),
            "Y": operand_place(ops, end, "y"),
            **_places(ops, run, number),
        },
    )


def _grouped(ops: Sequence[Op], run: Run, numbers: tuple[int, ...], device: Device) -> KernelLaunch:
    """By groups of four warps."""
    products = [ops[run.products[number]] for number in numbers]
    dtype, tokens = products[0].dtype, products[0].count.most
    assert dtype is not None
    paired = run.gate is not None
    rows = [product.most_sizes()["rows"] for product in products]
    rows = [sum(rows)] if paired else rows
    shape = group_shape(dtype, tokens, rows, device)
    end = run.gate if run.gate is not None else run.residual
    places = {}
    for i, number in enumerate(numbers):
        places[f"W{i}"] = operand_place(ops, run.products[number], "weight")
        places[f"B{i}"] = operand_place(ops, run.biases[number], "bias")
        places[f"Y{i}"] = operand_place(ops, writer(run, number) if end is None else end, "y")
    return KernelLaunch(
        "unit_groups.cu",
        "unit_groups",
        (shape.row_blocks(rows), -(-tokens // shape.tokens), 1),
        (shape.groups * GROUP_WARPS * 32, 1, 1),
        shape.shared_bytes(dtype),
        {
            "WARP_GROUPS": shape.groups,
            "BLOCK_TOKENS": shape.tokens,
            "SPLIT": int(shape.split),
            "STAGES": shape.stages,
            "WARP_PRODUCTS": int(by_single_warps(dtype, shape)),
            "MATRICES": len(numbers),
            "GATE": packet_number(run.gate),
            **size_places("swiglu", "activation"),
            **places,
            **_places(ops, run, numbers[0]),
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

    def row_blocks(self, rows: Sequence[int]) -> int:
        """Blocks of all matrices; none has rows of two."""
        return sum(-(-of_matrix // self.rows) for of_matrix in rows)

    def shared_bytes(self, dtype: DType) -> int:
        """Stages with their barriers; totals of a block whose groups have rows of their own."""
        of_tokens = self.tokens * (TOKEN_BYTES + SUM_BYTES + 4)
        stage = of_tokens + self.rows // UNIT_ROWS * unit_bytes(dtype) + BARRIER_BYTES
        stages = self.stages * stage
        return stages * self.groups if self.split else stages + 4 * self.rows * self.tokens

    def work(self, tokens: int) -> int:
        """Blocks of tokens. Decode tokens beside a whole chunk of a prompt seldom fill one."""
        return -(-tokens // self.tokens) if self.split else max(1, tokens // self.tokens)


WARP_TOKENS = 16
"""A product of a group takes hardly less time for fewer tokens."""
SHAPES = {
    GroupShape(4, 32, True): 8,
    GroupShape(4, 16, True, 3): 7,
    GroupShape(4, 16, True): 7,
    GroupShape(4, 64, False): 38,
    GroupShape(3, 64, False): 30,
    GroupShape(2, 64, False): 23,
}
"""With a block's time for a unit of its columns, in tenths of a microsecond of an H200."""
FOUR_SUMS_TIME = 30
"""Of two groups that each make four sums."""


def by_single_warps(dtype: DType, shape: GroupShape) -> bool:
    """Whether each warp of a group multiplies by itself; there are no registers for the sums of
    Q6_K where groups are split."""
    return shape.split and (shape.tokens <= WARP_TOKENS or dtype in FOUR_SUM_FORMATS)


def group_shape(dtype: DType, tokens: int, rows: Sequence[int], device: Device) -> GroupShape:
    """The one that takes least time, when as many blocks run at once as there are
    multiprocessors."""

    def time(shape: GroupShape) -> int:
        blocks = shape.row_blocks(rows) * shape.work(tokens)
        of_block = SHAPES[shape]
        if dtype in FOUR_SUM_FORMATS and not shape.split:
            of_block = FOUR_SUMS_TIME
        return -(-blocks // device.multiprocessors) * of_block

    return min((shape for shape in SHAPES if _fits(shape, dtype, tokens, device)), key=time)


def _fits(shape: GroupShape, dtype: DType, tokens: int, device: Device) -> bool:
    if shape.shared_bytes(dtype) > device.shared_bytes:
        return False
    if shape.split:
        return tokens <= MOST_SPLIT_TOKENS
    return dtype not in FOUR_SUM_FORMATS or shape.groups <= FOUR_SUM_GROUPS


def _places(ops: Sequence[Op], run: Run, number: int) -> dict[str, int]:
    """What the launches of products have in common; ``number`` is the first product's."""
    product = ops[run.products[number]]
    assert product.dtype is not None
    return {
        "FORMAT_ID": product.dtype.ggml_id,
        "PRODUCT": run.products[number],
        "M": operand_place(ops, run.quantize, "m"),
        "SCALE": operand_place(ops, run.quantize, "scale"),
        "SUMS": operand_place(ops, run.quantize, "sums"),
        "RESIDUAL": operand_place(ops, run.residual, residual_operand(ops, run)),
        **size_places("matmul", "rows", "columns"),
    }
