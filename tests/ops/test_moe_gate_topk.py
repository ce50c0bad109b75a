"""MOE_GATE_TOPK against binary64 softmax, hand-made ties and the edges of the routing."""

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from contract.dtypes import Q8_0
from reference.exact.elementary import exp
from reference.ops.moe_gate_topk import choose, moe_gate_topk, route
from tests.ops.experts import stored
from tests.ops.products import exact_product, fractions, random_matrix
from tests.ops.scalar import F, long_sum

Float32 = NDArray[np.float32]
RELATIVE = 1e-6
"""A few roundings of exp, two divisions and sums of hundreds of terms."""


def of_logits(logits: ArrayLike, used: int) -> tuple[Float32, NDArray, Float32]:
    """The opcode on an identity, so that the logits are the activations."""
    x = np.array(logits, np.float32)
    return moe_gate_topk(x=x, gate_weight=stored(np.eye(x.shape[1], dtype=np.float32)), used=used)


def test_against_binary64():
    """Ids and weights of a softmax in binary64, where no two probabilities are close."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 64), dtype=np.float32)
    gate = rng.standard_normal((70, 64), dtype=np.float32)
    logits, ids, weights = moe_gate_topk(x=x, gate_weight=stored(gate), used=6)
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    order = np.argsort(-p, axis=1)[:, :6]
    chosen = np.take_along_axis(p, order, axis=1)
    assert (ids == order).all()
    assert np.allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=RELATIVE, atol=0)


def test_logits_are_the_product():
    """A stored gate: every logit is rule R5's."""
    x = np.random.default_rng(2).standard_normal((2, 288), dtype=np.float32)
    gate = random_matrix(Q8_0, 5, 288, 3)
    logits, _, _ = moe_gate_topk(x=x, gate_weight=gate, used=1)
    assert fractions(logits) == exact_product(x, gate)


def test_every_bit_of_a_row_of_two_spans():
    """The rules written with scalars: the sum of 1,300 exponentials is R3 over R4."""
    logits = (3 * np.random.default_rng(4).standard_normal((1, 1300))).astype(np.float32)
    ids, weights = route(logits, 3)
    largest = max(logits[0])
    exponentials = [F(v) for v in exp(np.array([F(v - largest) for v in logits[0]]))]
    total = long_sum(exponentials)
    p = [F(e / total) for e in exponentials]
    order = sorted(range(1300), key=lambda i: (-p[i], i))[:3]
    partial = F(0.0)
    for index in order:
        partial = F(partial + p[index])
    assert ids[0].tolist() == order
    assert weights[0].tolist() == [F(p[index] / partial) for index in order]


def test_equal_logits_go_to_the_lower_index():
    """All equal, and two pairs of equals."""
    _, ids, weights = of_logits([[0.5] * 8, [1, 3, 0, 3, 1, -2, -2, 1]], used=4)
    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 0, 4]]
    assert weights[0].tolist() == [0.25] * 4


def test_different_logits_of_equal_probability_are_a_tie():
    """Order is by p: below exp's range both are zero, whatever the logits say."""
    _, ids, weights = of_logits([[0, -200, -100, -300]], used=3)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.tolist() == [[1, 0, 0]]


def test_subnormal_probability_counts_as_zero():
    """exp(-87) / 3 is below 2^-126: a device that flushes it must choose the same experts."""
    _, ids, weights = of_logits([[0, 0, 0, -90, -87]], used=4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights[0, 3] == 0.0


@pytest.mark.parametrize("experts", [1, 5])
def test_every_expert_used(experts):
    """used == experts: all of them by falling probability, a sum that is 1 or next to it."""
    logits = [[float(v) for v in np.linspace(-1, 1, experts)]]
    _, ids, weights = of_logits(logits, used=experts)
    assert ids.tolist() == [list(range(experts))[::-1]]
    assert abs(float(weights.sum()) - 1) <= RELATIVE


def test_sum_never_below_its_least():
    """20,000 equal experts: p = 5e-5 is divided by 2^-14, not by itself."""
    ids, weights = route(np.zeros((1, 20_000), np.float32), 1)
    assert ids.tolist() == [[0]]
    assert weights[0, 0] == F(F(1.0) / F(20_000.0)) / F(2.0**-14)
    _, two = route(np.zeros((1, 20_000), np.float32), 2)
    assert two.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_broken_token_breaks_no_other(poison):
    """It gets the first experts with NaN weights; its neighbours keep their bits."""
    x = np.random.default_rng(5).standard_normal((3, 32), dtype=np.float32)
    gate = random_matrix(Q8_0, 9, 32, 6)
    _, clean_ids, clean_weights = moe_gate_topk(x=x, gate_weight=gate, used=4)
    x[1, 7] = poison
    with np.errstate(invalid="ignore"):
        _, ids, weights = moe_gate_topk(x=x, gate_weight=gate, used=4)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert np.isnan(weights[1]).all()
    assert (ids[[0, 2]] == clean_ids[[0, 2]]).all()
    assert (weights[[0, 2]] == clean_weights[[0, 2]]).all()


def test_minus_infinity_is_an_expert_never_preferred():
    """It has probability zero; a row of nothing else is a broken token."""
    with np.errstate(invalid="ignore"):
        ids, weights = route(np.array([[-np.inf, 1, -np.inf, 0], [-np.inf] * 4], np.float32), 3)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert weights[0, 2] == 0
    assert np.isnan(weights[1]).all()


def test_no_tokens():
    """Empty results of the right shapes."""
    logits, ids, weights = of_logits(np.zeros((0, 6)), used=2)
    assert (logits.shape, ids.shape, weights.shape) == ((0, 6), (0, 2), (0, 2))


def test_the_bias_chooses_too():
    """It is added before the softmax, so it changes ids and weights."""
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    bias = np.array([5.0, 0.0, -9.0], np.float32)
    identity = stored(np.eye(3, dtype=np.float32))
    logits, ids, weights = moe_gate_topk(x=x, gate_weight=identity, used=2, bias=bias)
    assert logits.tolist() == [[6.0, 2.0, -6.0]]
    assert ids.tolist() == [[0, 1]]
    assert (weights == of_logits(logits, 2)[2]).all()


def test_a_bias_of_the_choice_weights_nothing():
    """Sigmoids in binary64 weight what the largest sigmoid + bias choose."""
    rng = np.random.default_rng(6)
    logits = 3 * rng.standard_normal((9, 40), dtype=np.float32)
    bias = rng.standard_normal(40, dtype=np.float32)
    ids, weights = choose(logits, 5, bias)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    order = np.argsort(-(p + bias), axis=1)[:, :5]
    chosen = np.take_along_axis(p, order, axis=1)
    assert (ids == order).all()
    assert (ids != np.argsort(-p, axis=1)[:, :5]).any()
    assert np.allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6, atol=0)


def test_a_bias_of_the_choice_beside_a_softmax():
    """Softmaxes in binary64 weight what the largest p + bias choose; a broken row is alone."""
    rng = np.random.default_rng(9)
    logits = 3 * rng.standard_normal((9, 40), dtype=np.float32)
    bias = (0.2 * rng.standard_normal(40)).astype(np.float32)
    ids, weights = choose(logits, 5, bias, softmax=True)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    order = np.argsort(-(p + bias), axis=1)[:, :5]
    chosen = np.take_along_axis(p, order, axis=1)
    assert (ids == order).all()
    assert (ids != choose(logits, 5, bias)[0]).any()
    assert np.allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6, atol=0)
    logits[4, 7] = np.inf
    with np.errstate(invalid="ignore"):
        broken = choose(logits, 5, bias, softmax=True)
    assert broken[0][4].tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(broken[1][4]).all()
    assert (np.delete(broken[0], 4, 0) == np.delete(ids, 4, 0)).all()


@pytest.mark.parametrize("choice_bias", [None, np.arange(12, dtype=np.float32)])
def test_weights_that_are_not_renormalized(choice_bias):
    """The same experts, weighted by their probabilities among all, or by their sigmoids."""
    x = np.random.default_rng(7).standard_normal((5, 12), dtype=np.float32)
    given = {"x": x, "gate_weight": stored(np.eye(12, dtype=np.float32)), "used": 4}
    _, ids, weights = moe_gate_topk(**given, choice_bias=choice_bias, renormalize=0)
    p = np.exp(x.astype(np.float64))
    p = p / p.sum(axis=1, keepdims=True) if choice_bias is None else p / (1 + p)
    assert (ids == moe_gate_topk(**given, choice_bias=choice_bias)[1]).all()
    assert np.allclose(weights, np.take_along_axis(p, ids, axis=1), rtol=RELATIVE, atol=0)


def test_experts_are_of_the_best_groups():
    """Those whose two largest sigmoids + biases have the largest sums, in binary64."""
    rng = np.random.default_rng(8)
    logits = 3 * rng.standard_normal((40, 24), dtype=np.float32)
    bias = rng.standard_normal(24, dtype=np.float32)
    ids, weights = choose(logits, 5, bias, True, 6, 2)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for token, score in enumerate((p + bias).reshape(40, 6, 4)):
        best = np.argsort([-np.sort(group)[-2:].sum() for group in score])[:2]
        allowed = [4 * int(group) + i for group in best for i in range(4)]
        order = sorted(allowed, key=lambda expert: -score.reshape(-1)[expert])[:5]
        assert ids[token].tolist() == order
        chosen = p[token, order]
        assert np.allclose(weights[token], chosen / chosen.sum(), rtol=1e-6, atol=0)
    assert (ids != choose(logits, 5, bias)[0]).any()


def test_of_equal_groups_the_first_are_chosen():
    ids, _ = choose(np.zeros((1, 8), np.float32), 4, np.zeros(8, np.float32), True, 4, 2)
    assert ids.tolist() == [[0, 1, 2, 3]]
    logits = np.zeros((1, 8), np.float32)
    logits[0, 1] = np.nan
    assert np.isnan(choose(logits, 2, np.arange(8, dtype=np.float32), True, 4, 1)[1]).all()


def test_what_a_device_may_flush_decides_no_choice():
    """Biases below 2^-126 are zeros, and so are their sums with sigmoids."""
    logits = np.array([[-200.0, -88.0, -200.0, 0.0]], np.float32)
    ids, _ = choose(logits, 3, np.array([0.0, 1e-39, 1e-38, -1.0], np.float32))
    assert ids.tolist() == [[0, 1, 2]]
    least = np.float32(1.0) / (np.float32(1.0) + exp(np.float32([87.0])))[0]
    beside = np.nextafter(least, np.float32(1.0), dtype=np.float32)
    ids, _ = choose(logits, 2, np.array([-least, -beside, -least, -1.0], np.float32))
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_choice_that_is_not_finite_breaks_its_token_alone(broken):
    logits = np.zeros((2, 4), np.float32)
    logits[1, 2] = np.nan
    ids, weights = choose(logits, 2, np.arange(4, dtype=np.float32))
    assert ids.tolist() == [[3, 2], [0, 1]]
    assert np.isfinite(weights[0]).all()
    assert np.isnan(weights[1]).all()
    bias = np.array([0.0, broken, 0.0, 0.0], np.float32)
    assert np.isnan(choose(logits, 2, bias)[1]).all()
