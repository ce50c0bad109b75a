"""MATMUL: activations times a stored weight matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.matrix import Matrix
from reference.quant import dot


def matmul(*, x: NDArray[np.float32], weight: Matrix) -> NDArray[np.float32]:
    """y = x weight^T by rules R3 to R5. ``x`` is [tokens, inner]; returns [tokens, outputs]."""
    return dot.matmul(weight.blocks, weight.dtype, x)
