"""MATMUL_WMMA_F16: the bits of rule R4 whatever unit multiplies."""

from __future__ import annotations

import numpy as np

from contract import dtypes
from reference.ops.matmul_wmma_f16 import matmul_wmma_f16
from tests.ops.products import exact_product, fractions, random_matrix


def test_every_bit() -> None:
    """Products and sums in scalar binary32."""
    a = np.random.default_rng(1).standard_normal((3, 300), dtype=np.float32)
    b = random_matrix(dtypes.F16, 4, 300, 5)
    assert fractions(matmul_wmma_f16(a=a, b=b)) == exact_product(a, b)


def test_half_precision_activations_would_differ() -> None:
    """Negative control: what a matrix unit does by itself, rounding a to binary16, is caught."""
    a = np.random.default_rng(1).standard_normal((3, 300), dtype=np.float32)
    b = random_matrix(dtypes.F16, 4, 300, 5)
    rounded = a.astype(np.float16).astype(np.float32)
    assert (matmul_wmma_f16(a=a, b=b) != matmul_wmma_f16(a=rounded, b=b)).any()
