"""MATMUL_WMMA_F16: MATMUL for matrix units fed with binary16 weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.matrix import Matrix
from reference.ops.matmul import matmul


def matmul_wmma_f16(*, a: NDArray[np.float32], b: Matrix) -> NDArray[np.float32]:
    """c = a b^T with b in binary16. Returns [tokens, outputs]."""
    return matmul(x=a, weight=b)
