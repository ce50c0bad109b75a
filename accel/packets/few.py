"""Products of few tokens in small tiles, see ``accel/kernels/matmul_few.k``: for matrix units of
Vulkan, in place of ``matmul_tiles``, whose bits and operands are theirs.
"""

from __future__ import annotations

from dataclasses import replace

from accel.packets.fused_ops import FUSED
from accel.packets.step import Op, Step

FEW_PRODUCT = "matmul_few"
FEW_FORMS = (16, 64)
"""Tokens up to which steps are a form of their own, in small tiles: with more, larger tiles read
less and leave few multiprocessors idle."""


def with_few_tokens(step: Step) -> Step:
    """The step with its products on matrix units in small tiles, if its tokens are few."""
    return Step([_few(op) if _is_worth_it(op) else op for op in step.ops], step.scratch)


def _few(op: Op) -> Op:
    return replace(op, device=FUSED[FEW_PRODUCT])


def _is_worth_it(op: Op) -> bool:
    return op.name == "matmul_tiles" and op.count.most <= FEW_FORMS[-1]
