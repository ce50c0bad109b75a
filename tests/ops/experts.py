"""Expert weights and routings for the tests of the mixture-of-experts opcodes."""

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32, DType
from reference.matrix import Matrix
from tests.ops.products import random_matrix

Float32 = NDArray[np.float32]


def expert_matrices(dtype: DType, experts: int, rows: int, columns: int, seed: int) -> Matrix:
    """A stored weight [experts, rows, columns] of random bits."""
    flat = random_matrix(dtype, experts * rows, columns, seed)
    return Matrix(dtype, (experts, rows, columns), flat.blocks)


def stored(values: Float32) -> Matrix:
    """Numbers as an F32 weight of the same shape."""
    return Matrix(F32, values.shape, values.reshape(-1, values.shape[-1]).view(np.uint8))


def routing(tokens: int, experts: int, used: int, seed: int) -> NDArray[np.int32]:
    """Distinct experts for every token, [tokens, used]."""
    liking = np.random.default_rng(seed).random((tokens, experts))
    return np.argsort(liking, axis=1)[:, :used].astype(np.int32)
