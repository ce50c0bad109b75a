"""SHARED_EXPERT against binary64 and its parts."""

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import Q8_0
from reference.exact.elementary import sigmoid
from reference.ops.matmul import matmul
from reference.ops.shared_expert import shared_expert
from reference.ops.swiglu import swiglu
from tests.ops.experts import stored
from tests.ops.products import random_matrix
from tests.ops.scalar import F, long_sum

Float32 = NDArray[np.float32]


def test_against_binary64():
    """The whole formula on float weights."""
    rng = np.random.default_rng(1)
    x, residual = rng.standard_normal((2, 3, 40), dtype=np.float32)
    gate, up = rng.standard_normal((2, 24, 40), dtype=np.float32)
    down = rng.standard_normal((40, 24), dtype=np.float32)
    router = rng.standard_normal(40, dtype=np.float32)
    got = shared_expert(
        x=x, gate_weight=stored(gate), up_weight=stored(up), down_weight=stored(down),
        residual=residual, router_weight=router,
    )  # fmt: skip
    x, gate, up, down = (v.astype(np.float64) for v in (x, gate, up, down))
    g = x @ gate.T
    exact = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T / (1 + np.exp(-(x @ router)))[:, None]
    assert np.allclose(got, residual + exact, rtol=1e-4, atol=1e-4)


def parts() -> dict[str, object]:
    """Stored weights, and activations of two spans."""
    rng = np.random.default_rng(2)
    return {
        "x": rng.standard_normal((2, 1312), dtype=np.float32),
        "gate_weight": random_matrix(Q8_0, 32, 1312, 3),
        "up_weight": random_matrix(Q8_0, 32, 1312, 4),
        "down_weight": random_matrix(Q8_0, 1312, 32, 5),
        "residual": rng.standard_normal((2, 1312), dtype=np.float32),
    }


def test_every_rounding():
    """The router is a dot product by R3 and R4, and the gate is rounded before it multiplies."""
    held = parts()
    router = np.random.default_rng(6).standard_normal(1312, dtype=np.float32)
    x = held["x"]
    hidden = swiglu(
        gate=matmul(x=x, weight=held["gate_weight"]), up=matmul(x=x, weight=held["up_weight"])
    )
    down = matmul(x=hidden, weight=held["down_weight"])
    got = shared_expert(**held, router_weight=router)
    for token in range(2):
        dot = long_sum([F(a * b) for a, b in zip(x[token], router, strict=True)])
        opened = sigmoid(np.array([dot]))[0]
        assert (got[token] == held["residual"][token] + opened * down[token]).all()


def test_without_a_router_it_counts_in_full():
    """A router of zeros halves what the expert adds; none at all does not."""
    held = parts()
    held["residual"] = np.zeros((2, 1312), np.float32)
    full = shared_expert(**held)
    assert (shared_expert(**held, router_weight=np.zeros(1312, np.float32)) == full / 2).all()
    assert full.any()


def test_broken_token_breaks_no_other():
    """NaN in one token."""
    held = parts()
    clean = shared_expert(**held)
    held["x"] = held["x"].copy()
    held["x"][0, 9] = np.nan
    got = shared_expert(**held)
    assert np.isnan(got[0]).all()
    assert (got[1] == clean[1]).all()
