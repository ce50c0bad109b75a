"""Products with many tokens: activations packed once, then a launch for every matrix.

The runs are those of ``accel.cuda.products`` without a gate: ``rms_norm? quantize_activation``, the
products of those integers with their biases, a residual behind a single one.
"""

from __future__ import annotations

from collections.abc import Sequence

from accel.cuda.device import Device
from accel.cuda.products import FEW, Run, aligned_rows, is_private, residual_operand, runs, writer
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
TOKEN_BYTES = 512 + 64
"""Of a unit in shared memory: two planes, and what keeps two tokens in different banks."""
SUM_BYTES = 32
MOST_PACKING_BLOCKS = 1 << 12


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
            launches += [_product(ops, run, number) for number in range(len(products))]
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


def _product(ops: Sequence[Op], run: Run, number: int) -> KernelLaunch:
    product = ops[run.products[number]]
    rows = product.most_sizes()["rows"]
    end = run.residual if run.residual is not None else writer(run, number)
    assert product.dtype is not None
    return KernelLaunch(
        "unit_matrix.cu",
        "unit_matrix",
        (-(-rows // BLOCK_ROWS), -(-product.count.most // BLOCK_TOKENS), 1),
        (WARPS * 32, 1, 1),
        shared_bytes(product.dtype),
        {
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
        },
    )
