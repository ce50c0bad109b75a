"""Products on matrix units: of few tokens in tiles of 32 rows and 16 tokens, of many in tiles of
128 rows and 128 tokens, or 64.

They replace ``matmul_tiles`` with the same bits and operands; see ``matmul_few.k`` and
``wide_product.k`` in ``accel/kernels``."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import groupby

from accel.kernels.matrix_tiles import FEW_PRODUCT, NARROW_PRODUCT, WIDE_FORMATS, WIDE_PRODUCT
from accel.packets.fused import operands_of
from accel.packets.fused_ops import FUSED
from accel.packets.step import Op, Step

SMALL_BUCKETS = (16, 64)
"""Most tokens of the buckets whose products use tiles of 16 tokens: with more tokens larger tiles
read less memory and leave few multiprocessors idle."""
WIDE_FROM = 512
"""Fewest tokens of a bucket's largest step for which tiles of 128 rows are faster: with fewer, most
of a tile may be empty, or most multiprocessors idle."""
MIN_ROWS = 2560
"""Fewest rows of a matrix for which tiles of 128 tokens are faster than tiles of 64, of which there
are more for the multiprocessors."""
LONGEST_FIRST = ("matmul_tiles", WIDE_PRODUCT, NARROW_PRODUCT)
"""Products that are launched together, by the time of a work-group: short ones fill multiprocessors
that long ones leave idle at their end."""


def with_tiles_32x16(step: Step) -> Step:
    """The step with its products in tiles of 16 tokens if it has few tokens."""
    made = list(step.ops)
    for index, op in enumerate(made):
        if op.name == "matmul_tiles" and op.count.maximum <= SMALL_BUCKETS[-1]:
            made[index] = replace(op, device=FUSED[FEW_PRODUCT])
    return Step(made, step.scratch)


def with_tiles_128x128(step: Step) -> Step:
    """The step with products in tiles of 128 rows where they are faster, and products of the same
    activations in the order of LONGEST_FIRST."""
    ops = [_wide(op) if _is_worth_it(op) else op for op in step.ops]
    made: list[Op] = []
    for _, equal in groupby(ops, _order_key):
        made += sorted(equal, key=_length)
    return Step(made, step.scratch)


def _order_key(op: Op) -> Hashable:
    """A key that is equal for products that may be launched in any order: they read the same
    activations and nothing that another one writes."""
    tensors = operands_of(op)
    if op.name in LONGEST_FIRST and tensors["residual"] is None:
        return tensors["x"]
    return id(op)


def _length(op: Op) -> int:
    return LONGEST_FIRST.index(op.name) if op.name in LONGEST_FIRST else 0


def _wide(op: Op) -> Op:
    is_narrow = op.max_sizes()["rows"] < MIN_ROWS
    return replace(op, device=FUSED[NARROW_PRODUCT if is_narrow else WIDE_PRODUCT])


def _is_worth_it(op: Op) -> bool:
    return op.name == "matmul_tiles" and op.dtype in WIDE_FORMATS and op.count.maximum >= WIDE_FROM
