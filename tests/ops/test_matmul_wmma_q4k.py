"""MATMUL_WMMA_Q4K: the bits of rule R5 whatever unit multiplies."""

from __future__ import annotations

import numpy as np

from contract import dtypes
from reference.ops.matmul_wmma_q4k import matmul_wmma_q4k
from tests.ops.products import exact_product, fractions, random_matrix


def test_every_bit() -> None:
    """In rational arithmetic."""
    b = np.random.default_rng(1).standard_normal((2, 1536), dtype=np.float32)
    a = random_matrix(dtypes.Q4_K, 3, 1536, 5)
    assert fractions(matmul_wmma_q4k(a=a, b=b)) == exact_product(b, a)
