"""LM_HEAD: the projection of the final hidden state onto the vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.matrix import Matrix
from reference.ops.matmul import matmul


def lm_head(*, x: NDArray[np.float32], weight: Matrix) -> NDArray[np.float32]:
    """logits = x weight^T. ``x`` is [rows, hidden]; returns [rows, vocab]."""
    return matmul(x=x, weight=weight)
