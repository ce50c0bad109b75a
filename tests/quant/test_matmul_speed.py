"""How fast prepared products are against the bound memory sets: printed (``-s``), never asserted.

The bound of a single-token product is the time one core takes to read the matrix as binary32,
which is what a matrix-vector product of a plain BLAS would have to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from contract.dtypes import F16, IQ4_NL, IQ4_XS, Q2_K, Q4_1, Q4_K, Q6_K, Q8_0, DType
from reference.cpu.matmul import prepare_weight, prepared_matmul
from reference.quant.dot import matmul
from tests.quant.samples import activations, random_blocks

ROWS, COLUMNS = 1536, 1536
COPIES = 6
"""Distinct weights used in turn, so that one token's weights do not stay in the cache."""


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.fixture(scope="module")
def bytes_per_second() -> float:
    """Bandwidth of reading memory once with one core."""
    stream = np.ones(1 << 25, np.float32)
    return stream.nbytes / best_seconds(stream.max, 5)


@pytest.mark.parametrize("dtype", [Q4_1, Q8_0, Q4_K, Q6_K, F16, Q2_K, IQ4_NL, IQ4_XS], ids=str)
def test_speed(dtype: DType, bytes_per_second: float) -> None:
    """Prints the ratio to the bound; what is asserted are the bits of what was timed."""
    blocks = random_blocks(dtype, ROWS, COLUMNS, seed=0)
    weights = [prepare_weight(dtype, blocks) for _ in range(COPIES)]
    bound = ROWS * COLUMNS * 4 / bytes_per_second
    for tokens in (1, 32):
        x = activations("gaussian", tokens, COLUMNS, seed=1)
        out = np.empty((tokens, ROWS), np.float32)

        def run(x: np.ndarray = x, out: np.ndarray = out) -> None:
            for weight in weights:
                prepared_matmul(weight, x, out)

        seconds = best_seconds(run, 5) / COPIES
        rate = tokens * ROWS * COLUMNS / seconds / 1e9
        print(
            f"\n{dtype.name}, {tokens} tokens: {seconds * 1e3:.2f} ms, {rate:.2f} G products/s, "
            f"{seconds / bound:.1f} x the time to read it in binary32"
        )
        assert np.array_equal(out[:2], matmul(blocks, dtype, x[:2]))
