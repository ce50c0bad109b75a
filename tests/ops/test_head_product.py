"""HEAD_PRODUCT: each head times the matrix it names, behind channels that are not multiplied."""

import numpy as np
import pytest

from contract.dtypes import F32, Q4_K, Q8_0
from reference.ops.head_product import head_product
from tests.ops.experts import expert_matrices
from tests.ops.products import exact_product

TOKENS, HEADS, INNER, OUTPUTS, BEFORE, REST = 3, 4, 256, 5, 3, 2
MATRIX_OF = np.array([2, 0, 1, 0], np.int32)


@pytest.mark.parametrize("dtype", [F32, Q8_0, Q4_K], ids=str)
def test_every_bit(dtype):
    """The last channels of a head, in rational arithmetic; two heads share a matrix."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((TOKENS, HEADS, BEFORE + INNER), dtype=np.float32)
    rest = rng.standard_normal((TOKENS, HEADS, REST), dtype=np.float32)
    weight = expert_matrices(dtype, 3, OUTPUTS, INNER, 2)
    given = {
        "x": x.reshape(TOKENS, -1), "weight": weight, "matrix_of": MATRIX_OF, "heads": HEADS,
    }  # fmt: skip
    got = head_product(**given).reshape(TOKENS, HEADS, OUTPUTS)
    for head, number in enumerate(MATRIX_OF):
        expected = exact_product(x[:, head, BEFORE:], weight.expert(int(number)))
        assert got[:, head].tolist() == [[float(np.float32(v)) for v in row] for row in expected]
    both = head_product(**given, rest=rest.reshape(TOKENS, -1)).reshape(TOKENS, HEADS, -1)
    assert (both[..., :REST] == rest).all()
    assert (both[..., REST:] == got).all()


def test_no_tokens():
    weight = expert_matrices(Q8_0, 1, OUTPUTS, 32, 3)
    ids = np.zeros(HEADS, np.int32)
    y = head_product(
        x=np.zeros((0, HEADS * 32), np.float32), weight=weight, matrix_of=ids, heads=HEADS
    )
    assert y.shape == (0, HEADS * OUTPUTS)
