"""LM_HEAD: the projection of the final hidden state onto the vocabulary."""

from __future__ import annotations

from contract.arrays import Floats
from reference.matrix import Matrix
from reference.ops.matmul import matmul


def lm_head(*, x: Floats, weight: Matrix) -> Floats:
    """logits = x weight^T. ``x`` is [rows, hidden]; returns [rows, vocab]."""
    return matmul(x=x, weight=weight)
