"""MATMUL: activations times a stored weight matrix."""

from __future__ import annotations

from contract.arrays import Floats
from reference.matrix import Matrix
from reference.quant import dot


def matmul(*, x: Floats, weight: Matrix) -> Floats:
    """y = x weight^T by rules R3 to R5. ``x`` is [tokens, inner]; returns [tokens, outputs]."""
    return dot.matmul(weight.blocks, weight.dtype, x)
