"""MOE_DOWN_ACC: the weighted sum over experts, in order, one rounding at a time."""

import numpy as np
import pytest

from contract.dtypes import Q4_K, Q8_0
from reference.ops.moe_down_acc import moe_down_acc
from tests.ops.experts import expert_matrices, routing, stored
from tests.ops.products import exact_product
from tests.ops.scalar import F


@pytest.mark.parametrize("dtype", [Q8_0, Q4_K], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_every_bit(dtype, scaled, added, biased):
    """Products in rational arithmetic, then scalars in the order of ``ids``."""
    rng = np.random.default_rng(1)
    tokens, experts, used, hidden = 2, 5, 3, 4
    x = rng.standard_normal((tokens, used, 256), dtype=np.float32)
    down = expert_matrices(dtype, experts, hidden, 256, 2)
    ids = routing(tokens, experts, used, 3)
    weights = rng.random((tokens, used), dtype=np.float32)
    scale = rng.standard_normal(experts, dtype=np.float32)
    residual = rng.standard_normal((tokens, hidden), dtype=np.float32)
    bias = rng.standard_normal((experts, hidden), dtype=np.float32)
    got = moe_down_acc(
        x=x, down_weight=down, ids=ids, weights=weights, bias=bias if biased else None,
        expert_scale=scale if scaled else None, residual=residual if added else None,
    )  # fmt: skip
    for token in range(tokens):
        total = list(residual[token]) if added else [F(0.0)] * hidden
        for rank, expert in enumerate(ids[token]):
            products = exact_product(x[token, rank][None], down.expert(int(expert)))[0]
            for column, product in enumerate(products):
                value = F(float(product))
                if biased:
                    value = F(value + bias[expert, column])
                if scaled:
                    value = F(value * scale[expert])
                total[column] = F(total[column] + F(weights[token, rank] * value))
        assert got[token].tolist() == total


def test_the_order_of_the_experts_counts():
    """1e8 + 3 - 1e8: experts are added in the order of ranks, not of their ids."""
    x = np.ones((2, 3, 1), np.float32)
    down = stored(np.array([1e8, 3.0, -1e8], np.float32).reshape(3, 1, 1))
    ids = np.array([[0, 1, 2], [0, 2, 1]], np.int32)
    y = moe_down_acc(x=x, down_weight=down, ids=ids, weights=np.ones((2, 3), np.float32))
    assert y[:, 0].tolist() == [0.0, 3.0]


def test_the_residual_comes_first():
    """(1e8 + 3) - 1e8, where adding it last would leave 3 + ..."""
    down = stored(np.array([3.0, -1e8], np.float32).reshape(2, 1, 1))
    y = moe_down_acc(
        x=np.ones((1, 2, 1), np.float32),
        down_weight=down,
        ids=np.array([[0, 1]], np.int32),
        weights=np.ones((1, 2), np.float32),
        residual=np.array([[1e8]], np.float32),
    )
    assert y.tolist() == [[0.0]]


def test_a_weight_of_nan_breaks_its_token_alone():
    """What a broken routing does."""
    x = np.ones((2, 1, 4), np.float32)
    down = stored(np.ones((3, 2, 4), np.float32))
    weights = np.array([[np.nan], [0.5]], np.float32)
    ids = np.array([[0], [2]], np.int32)
    y = moe_down_acc(x=x, down_weight=down, ids=ids, weights=weights)
    assert np.isnan(y[0]).all()
    assert y[1].tolist() == [2.0, 2.0]


def test_no_tokens():
    """An empty result of the right shape."""
    y = moe_down_acc(
        x=np.zeros((0, 2, 4), np.float32),
        down_weight=stored(np.ones((3, 5, 4), np.float32)),
        ids=np.zeros((0, 2), np.int32),
        weights=np.zeros((0, 2), np.float32),
    )
    assert y.shape == (0, 5)
