"""MATMUL_WMMA_Q4K: MATMUL for matrix units fed with Q4_K weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.matrix import Matrix
from reference.ops.matmul import matmul


def matmul_wmma_q4k(*, a: Matrix, b: NDArray[np.float32]) -> NDArray[np.float32]:
    """c = b a^T with a in Q4_K. Returns [tokens, outputs]."""
    return matmul(x=b, weight=a)
