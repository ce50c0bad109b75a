"""LM_HEAD: the matrix product over the output rows."""

import numpy as np
import pytest

from contract import dtypes
from reference.ops.lm_head import lm_head
from tests.ops.products import exact_product, fractions, random_matrix


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.Q6_K, dtypes.F16], ids=str)
def test_every_bit(dtype):
    """The formats output matrices come in."""
    x = np.random.default_rng(1).standard_normal((2, 256), dtype=np.float32)
    weight = random_matrix(dtype, 5, 256, 2)
    assert fractions(lm_head(x=x, weight=weight)) == exact_product(x, weight)


def test_no_rows():
    """A step that wants no logits."""
    weight = random_matrix(dtypes.Q8_0, 5, 64, 2)
    assert lm_head(x=np.empty((0, 64), np.float32), weight=weight).shape == (0, 5)
