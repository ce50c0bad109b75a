"""SCALE_COLUMNS: a factor a column, or one for all."""

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from reference.ops.scale_columns import scale_columns


def test_a_factor_for_every_column():
    """Columns, not rows, even where both would fit; one rounding an element."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 5), dtype=np.float32)
    factors = rng.standard_normal(5, dtype=np.float32)
    got = scale_columns(x=x, factors=factors)
    for row in range(5):
        for column in range(5):
            assert got[row, column] == np.float32(x[row, column] * factors[column])
    assert (got != x * factors[:, None]).any()


def test_one_factor_for_all():
    """The same bits as that factor in every column."""
    x = np.random.default_rng(2).standard_normal((3, 7), dtype=np.float32)
    single = np.array([0.1], np.float32)
    got = scale_columns(x=x, factors=single)
    assert (got == scale_columns(x=x, factors=np.repeat(single, 7))).all()
    assert got.dtype == np.float32


def test_other_numbers_of_factors_are_refused():
    """By the shape rule, when the graph is built."""
    b = GraphBuilder("g")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    factors = b.buffer("f", BufferKind.WEIGHT, F32, (4,), "f")
    b.emit(Opcode.SCALE_COLUMNS, x=x, factors=factors)
    with pytest.raises(VerifyError, match="4 factors for 8 columns"):
        b.build()
