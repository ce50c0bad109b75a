"""Products of few tokens in tiles of 32 rows and 16 tokens, on matrix units.

They replace ``matmul_tiles`` with the same bits and operands; see ``accel/kernels/matmul_few.k``.
"""

from __future__ import annotations

from dataclasses import replace

from accel.kernels.matrix_tiles import FEW_PRODUCT
from accel.packets.fused_ops import FUSED
from accel.packets.step import Op, Step

SMALL_BUCKETS = (16, 64)
"""Most tokens of the buckets whose products use these tiles: with more tokens larger tiles read
less memory and leave few multiprocessors idle."""


def with_tiles_32x16(step: Step) -> Step:
    """The step with its products in these tiles if it has few tokens."""
    return Step([_few(op) if _is_worth_it(op) else op for op in step.ops], step.scratch)


def _few(op: Op) -> Op:
    return replace(op, device=FUSED[FEW_PRODUCT])


def _is_worth_it(op: Op) -> bool:
    return op.name == "matmul_tiles" and op.count.most <= SMALL_BUCKETS[-1]
