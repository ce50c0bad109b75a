"""EMBED: the row of every token id, expanded as the matrix product's oracle reads it."""

from fractions import Fraction

import numpy as np
import pytest

from contract import dtypes
from reference.matrix import Matrix
from reference.ops.embed import embed
from tests.exact.rounding import round32
from tests.quant.oracle import block32
from tests.quant.samples import random_blocks

BLOCK_FORMATS = tuple(d for d in dtypes.WEIGHT_DTYPES if d.storage is dtypes.StorageClass.INTEGER32)


def query_of(*ids: int) -> np.ndarray:
    """Query records of these token ids."""
    return np.array([(token, 0, position, 0) for position, token in enumerate(ids)], np.int32)


@pytest.mark.parametrize("dtype", BLOCK_FORMATS, ids=str)
def test_blocks_in_rational_arithmetic(dtype):
    """round(q d) and, with a minimum, round(round(q d) + m), for every element."""
    blocks = random_blocks(dtype, 5, 64, 3)
    got = embed(query=query_of(4, 0, 4), table=Matrix(dtype, (5, 64), blocks))
    for row, token in enumerate((4, 0, 4)):
        for block in range(2):
            start = block * dtype.block_bytes
            q, d, minimum = block32(
                dtype.name, blocks[token].tobytes()[start : start + dtype.block_bytes]
            )
            for lane, integer in enumerate(q):
                value = round32(d * integer)
                if minimum is not None:
                    value = round32(value + minimum)
                assert Fraction(float(got[row, 32 * block + lane])) == value


@pytest.mark.parametrize(("dtype", "element"), [(dtypes.F32, "<f4"), (dtypes.F16, "<f2")])
def test_float_tables_are_copied(dtype, element):
    """Every binary32 and binary16 value is exact."""
    values = np.random.default_rng(1).standard_normal((7, 9)).astype(element)
    table = Matrix(dtype, (7, 9), values.view(np.uint8))
    assert (embed(query=query_of(6, 2), table=table) == values[[6, 2]]).all()


def test_no_tokens():
    """An empty step has an empty result in every format."""
    table = Matrix(dtypes.Q4_K, (2, 256), random_blocks(dtypes.Q4_K, 2, 256, 1))
    assert embed(query=np.empty((0, 4), np.int32), table=table).shape == (0, 256)
