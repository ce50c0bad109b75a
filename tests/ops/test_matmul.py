"""MATMUL in every storage format against rational or scalar arithmetic."""

import numpy as np
import pytest

from contract.dtypes import WEIGHT_DTYPES, StorageClass
from reference.ops.matmul import matmul
from tests.ops.products import exact_product, fractions, random_matrix


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_every_bit(dtype):
    """A second span of two segments, the last of them short where the format allows it."""
    columns = {
        StorageClass.FLOAT: 1300,
        StorageClass.INTEGER32: 1312,
        StorageClass.SUPERBLOCK: 1536,
    }[dtype.storage]
    x = np.random.default_rng(5).standard_normal((2, columns), dtype=np.float32)
    weight = random_matrix(dtype, 3, columns, 11)
    assert fractions(matmul(x=x, weight=weight)) == exact_product(x, weight)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_broken_token_breaks_no_other(dtype, poison):
    """Every output of the token is NaN or infinite, those of its neighbour are unchanged."""
    x = np.random.default_rng(6).standard_normal((3, 512), dtype=np.float32)
    weight = random_matrix(dtype, 4, 512, 12)
    clean = matmul(x=x, weight=weight)
    x[1, 300] = poison
    got = matmul(x=x, weight=weight)
    assert (got[[0, 2]] == clean[[0, 2]]).all()
    assert not np.isfinite(got[1]).any()
