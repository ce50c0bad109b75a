"""MOE_GATE_UP: every pair of a token and an expert against exact arithmetic."""

import numpy as np
import pytest

from contract.dtypes import WEIGHT_DTYPES
from reference.ops.moe_gate_up import moe_gate_up
from tests.ops.experts import expert_matrices, routing, stored
from tests.ops.products import exact_product, fractions


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_every_bit(dtype):
    """The result of each rank is the product with the matrix of the expert of that rank."""
    x = np.random.default_rng(1).standard_normal((3, 256), dtype=np.float32)
    gate, up = (expert_matrices(dtype, 4, 3, 256, seed) for seed in (2, 3))
    ids = routing(3, 4, 2, 4)
    results = moe_gate_up(x=x, gate_weight=gate, up_weight=up, ids=ids)
    for weight, result in zip((gate, up), results, strict=True):
        for token, experts in enumerate(ids):
            for rank, expert in enumerate(experts):
                exact = exact_product(x[token : token + 1], weight.expert(int(expert)))
                assert fractions(result[token, rank][None]) == exact


def test_experts_do_not_overlap():
    """Expert e's matrix is e times the identity: an offset by a row would show."""
    x = np.arange(1, 6, dtype=np.float32)[None]
    matrices = np.stack([expert * np.eye(5, dtype=np.float32) for expert in range(7)])
    ids = np.array([[6, 0, 3]], np.int32)
    gate, up = moe_gate_up(x=x, gate_weight=stored(matrices), up_weight=stored(-matrices), ids=ids)
    assert (gate == x[:, None] * ids[..., None]).all()
    assert (up == -gate).all()


@pytest.mark.parametrize(
    ("tokens", "experts", "used"), [(1, 1, 1), (5, 1, 1), (4, 3, 3), (0, 3, 2)]
)
def test_edges_of_the_routing(tokens, experts, used):
    """One expert is a plain product; with all experts used, every rank has one; no token."""
    x = np.random.default_rng(5).standard_normal((tokens, 8), dtype=np.float32)
    weights = np.random.default_rng(6).standard_normal((experts, 4, 8), dtype=np.float32)
    ids = routing(tokens, experts, used, 7)
    gate, _ = moe_gate_up(x=x, gate_weight=stored(weights), up_weight=stored(weights), ids=ids)
    assert gate.shape == (tokens, used, 4)
    exact = np.einsum("tk,tunk->tun", x.astype(np.float64), weights[ids].astype(np.float64))
    assert np.allclose(gate, exact, rtol=1e-5, atol=1e-5)


def test_broken_token_breaks_no_other():
    """Tokens that share an expert with it keep their bits."""
    x = np.random.default_rng(8).standard_normal((3, 64), dtype=np.float32)
    weights = stored(np.random.default_rng(9).standard_normal((2, 4, 64), dtype=np.float32))
    ids = np.array([[0, 1], [1, 0], [0, 1]], np.int32)
    clean, _ = moe_gate_up(x=x, gate_weight=weights, up_weight=weights, ids=ids)
    x[1, 5] = np.nan
    gate, _ = moe_gate_up(x=x, gate_weight=weights, up_weight=weights, ids=ids)
    assert np.isnan(gate[1]).all()
    assert (gate[[0, 2]] == clean[[0, 2]]).all()


def test_the_biases_are_those_of_the_experts():
    """One rounding behind the product; gate and up have their own."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((3, 64), dtype=np.float32)
    weights = stored(rng.standard_normal((4, 5, 64), dtype=np.float32))
    biases = rng.standard_normal((2, 4, 5), dtype=np.float32)
    ids = routing(3, 4, 2, 11)
    plain, _ = moe_gate_up(x=x, gate_weight=weights, up_weight=weights, ids=ids)
    results = moe_gate_up(
        x=x, gate_weight=weights, up_weight=weights, ids=ids, gate_bias=biases[0], up_bias=biases[1]
    )
    for result, bias in zip(results, biases, strict=True):
        for token, chosen in enumerate(ids):
            for rank, expert in enumerate(chosen):
                assert (result[token, rank] == plain[token, rank] + bias[expert]).all()
