"""LOG_PROBABILITIES against rule R10 in scalars, against binary64, and its broken rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.exact.elementary import log
from reference.ops.log_probabilities import log_probabilities
from reference.ops.sample import NO_TOKEN
from tests.ops.paged import scalar_exp
from tests.ops.scalar import F, long_sum

Float32 = NDArray[np.float32]
ROUNDINGS = 4 * 2.0**-24
"""Two roundings near 1 and the log of a sum that is off by as much."""


def of_row(row: Float32, token: int, top: int) -> tuple[np.float32, list[int], Float32]:
    """The definition on one row."""
    token_of_row = np.array([token], np.int32)
    chosen, ids, logs = log_probabilities(logits=row[None], token=token_of_row, top=top)
    return chosen[0], ids[0].tolist(), logs[0]


@given(
    seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 1500), spread=st.sampled_from([0.3, 9.0])
)
@settings(max_examples=25, deadline=None)
def test_rule_in_scalars(seed, vocab, spread):
    """Half the logits tied, one more segment and span than whole ones; the same bits."""
    rng = np.random.default_rng(seed)
    row = (spread * rng.standard_normal(vocab)).astype(np.float32)
    half = vocab // 2
    row[rng.permutation(vocab)[:half]] = row[rng.permutation(vocab)[:half]]
    token, top = int(rng.integers(vocab)), min(vocab, 20)
    largest = max(row)
    log_sum = log(np.array([long_sum([scalar_exp(F(x - largest)) for x in row])]))[0]
    ranked = sorted(range(vocab), key=lambda i: (-row[i], i))[:top]
    chosen, ids, logs = of_row(row, token, top)
    assert chosen == F(F(row[token] - largest) - log_sum)
    assert ids == ranked
    assert logs.tolist() == [F(F(row[i] - largest) - log_sum) for i in ranked]


@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.0, 1.0, 5.0, 40.0]))
@settings(max_examples=25, deadline=None)
def test_close_to_binary64(seed, spread):
    """A few roundings from the log of the softmax, of probabilities down to exp(-80)."""
    row = (spread * np.random.default_rng(seed).standard_normal(5000)).astype(np.float32)
    exact = row.astype(np.float64) - row.max()
    exact = exact - np.log(np.exp(exact).sum())
    chosen, ids, logs = of_row(row, 17, 20)
    bound = ROUNDINGS * (1 + np.abs(exact) + np.log(len(row)))
    assert abs(chosen - exact[17]) < bound[17]
    assert (np.abs(logs - exact[ids]) < bound[ids]).all()
    assert np.exp(logs.astype(np.float64)).sum() < 1 + 1e-5


def test_a_certain_token_and_an_impossible_one():
    """log 1 is 0; a difference that overflows is -infinity, and no error."""
    row = np.array([3e38, -3e38], np.float32)
    with np.errstate(over="ignore"):
        chosen, ids, logs = of_row(row, 1, 2)
    assert chosen == -np.inf
    assert ids == [0, 1]
    assert logs.tolist() == [0.0, -np.inf]


def test_equal_logits_share_a_probability():
    """The lowest ids are listed; -0 ties with +0."""
    row = np.zeros(1024, np.float32)
    row[::2] = -0.0
    chosen, ids, logs = of_row(row, 1000, 5)
    assert ids == [0, 1, 2, 3, 4]
    assert logs.tolist() == [chosen] * 5
    assert chosen == -log(np.array([1024.0], np.float32))[0]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_row_says_nothing(broken):
    """And the rows beside it are as without it."""
    logits = np.random.default_rng(1).standard_normal((3, 30), dtype=np.float32)
    token = np.array([3, 4, 5], np.int32)
    before = log_probabilities(logits=logits, token=token, top=4)
    logits[1, 7] = broken
    chosen, ids, logs = log_probabilities(logits=logits, token=token, top=4)
    assert np.isnan(chosen[1])
    assert np.isnan(logs[1]).all()
    assert (ids[1] == NO_TOKEN).all()
    for now, then in zip((chosen, ids, logs), before, strict=True):
        assert (now[[0, 2]] == then[[0, 2]]).all()


@pytest.mark.parametrize("token", [NO_TOKEN, 30])
def test_no_token_has_no_probability(token):
    """A row in which nothing was allowed still lists its likeliest."""
    row = np.random.default_rng(2).standard_normal(30, dtype=np.float32)
    chosen, ids, logs = of_row(row, token, 3)
    assert np.isnan(chosen)
    assert ids == np.argsort(-row)[:3].tolist()
    assert np.isfinite(logs).all()


def test_no_rows():
    """A step that wants no logits."""
    chosen, ids, logs = log_probabilities(
        logits=np.empty((0, 5), np.float32), token=np.empty(0, np.int32), top=2
    )
    assert (chosen.shape, ids.shape, logs.shape) == ((0,), (0, 2), (0, 2))
    assert [chosen.dtype, ids.dtype, logs.dtype] == ["f4", "i4", "f4"]
