"""Products of many tokens in wide tiles, see ``accel/kernels/wide_product.k``: for matrix units of
Vulkan, in place of ``matmul_tiles``, whose bits and operands are theirs.
"""

from __future__ import annotations

from dataclasses import replace

from accel.packets.fused_ops import FUSED
from accel.packets.step import Op, Step
from contract.dtypes import Q4_K, Q5_K

WIDE_PRODUCT, NARROW_PRODUCT = "matmul_wide", "matmul_narrow"
WIDE_PRODUCTS = (WIDE_PRODUCT, NARROW_PRODUCT)
WIDE_FORMATS = (Q4_K, Q5_K)
"""Super-blocks of 32-blocks with minima."""
WIDE_FROM = 512
"""Tokens a step has at most from which on they are worth it: steps of fewer may have so few that
most of a tile is empty, or leave most multiprocessors idle."""
LEAST_ROWS = 2560
"""Of a matrix in tiles of 128 tokens, which of fewer leave most multiprocessors idle: those are
in tiles of 64."""


def with_wide_tiles(step: Step) -> Step:
    """The step with those of its products in wide tiles that are faster so."""
    return Step([_wide(op) if _is_worth_it(op) else op for op in step.ops], step.scratch)


def _wide(op: Op) -> Op:
    is_narrow = op.most_sizes()["rows"] < LEAST_ROWS
    return replace(op, device=FUSED[NARROW_PRODUCT if is_narrow else WIDE_PRODUCT])


def _is_worth_it(op: Op) -> bool:
    return op.name == "matmul_tiles" and op.dtype in WIDE_FORMATS and op.count.most >= WIDE_FROM
