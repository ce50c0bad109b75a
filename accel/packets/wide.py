"""Products of many tokens in wide tiles, see ``accel/kernels/wide_product.k``: for matrix units of
Vulkan, in place of ``matmul_tiles``, whose bits and operands are theirs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import groupby

from accel.packets.fused import operands_of
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


LONGEST_FIRST = ("matmul_tiles", WIDE_PRODUCT, NARROW_PRODUCT)
"""Products side by side, by how long a group takes: the last ones fill what others leave idle."""


def with_wide_tiles(step: Step) -> Step:
    """The step with those of its products in wide tiles that are faster so, and products of the
    same activations LONGEST_FIRST."""
    ops = [_wide(op) if _is_worth_it(op) else op for op in step.ops]
    made: list[Op] = []
    for _, beside in groupby(ops, _beside):
        made += sorted(beside, key=_length)
    return Step(made, step.scratch)


def _beside(op: Op) -> Hashable:
    """The same of products that may be launched in any order: they read the same activations and
    nothing that another one writes."""
    tensors = operands_of(op)
    if op.name in LONGEST_FIRST and tensors["residual"] is None:
        return tensors["x"]
    return id(op)


def _length(op: Op) -> int:
    return LONGEST_FIRST.index(op.name) if op.name in LONGEST_FIRST else 0


def _wide(op: Op) -> Op:
    is_narrow = op.most_sizes()["rows"] < LEAST_ROWS
    return replace(op, device=FUSED[NARROW_PRODUCT if is_narrow else WIDE_PRODUCT])


def _is_worth_it(op: Op) -> bool:
    return op.name == "matmul_tiles" and op.dtype in WIDE_FORMATS and op.count.most >= WIDE_FROM
