"""BIAS_ADD: one vector added to every row, one rounding each."""

import numpy as np

from reference.ops.bias_add import bias_add


def test_every_row_gets_the_bias():
    """Elementwise, in scalar arithmetic."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 33), dtype=np.float32)
    bias = rng.standard_normal(33, dtype=np.float32)
    got = bias_add(x=x, bias=bias)
    for row in range(5):
        for column in range(33):
            assert got[row, column] == np.float32(x[row, column] + bias[column])
