"""FLASH_ATTN_BATCHED against rule R6 in scalar arithmetic and against binary64 softmax."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference.exact.kv_storage import stored
from reference.ops.flash_attn_batched import flash_attn_batched
from tests.ops.paged import Sequence, pool_of, random_sequence, scalar_attention, softmax_attention

ABSOLUTE = 4e-3
"""Against binary64 for values of order one, from rows of 11 bits and weights of 13."""


def attend(
    sequences: list[Sequence],
    tokens: list[tuple[int, int]],
    q: NDArray[np.float32],
    heads: int,
    **params: Any,
) -> NDArray[np.float32]:
    """The definition's output as [tokens, heads, head_dim]."""
    kv, page_table = pool_of(sequences)
    _, kv_heads, head_dim = sequences[0].keys.shape
    query = np.array([(0, slot, position, 0) for slot, position in tokens], np.int32)
    out = flash_attn_batched(
        q=q.reshape(len(tokens), -1), kv=kv, page_table=page_table, query=query, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, **params,
    )  # fmt: skip
    return out.reshape(len(tokens), heads, head_dim)


def queries(seed: int, tokens: int, heads: int, head_dim: int) -> NDArray[np.float32]:
    """Gaussian queries."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, heads, head_dim), dtype=np.float32)


@pytest.mark.parametrize("head_dim", [1, 16, 17, 40])
@pytest.mark.parametrize("window", [0, 1, 63, 64, 65, -1, -63, -64, -128])
def test_scalar_rule(head_dim, window):
    """Every bit at positions around the tile cuts."""
    sequence = random_sequence(head_dim, 130, 1, head_dim)
    positions = [0, 62, 63, 64, 127, 128, 129]
    q = queries(abs(window), len(positions), 1, head_dim)
    got = attend([sequence], [(0, p) for p in positions], q, 1, scale=0.3, window=window)
    for row, position in enumerate(positions):
        first = max(0, position + 1 - window) if window else 0
        if window < 0:
            first = position - position % -window
        keys, values = sequence.keys[: position + 1, 0], sequence.values[: position + 1, 0]
        assert got[row, 0].tolist() == scalar_attention(q[row, 0], keys, values, first, 0.3)


def test_q8_0_pages_read_as_scale_times_integer():
    """The bits of the same attention over binary32 pages that hold every d q."""
    sequences = [random_sequence(seed, length, 2, 64) for seed, length in enumerate((1, 130))]
    kv, page_table = pool_of(sequences)
    blocks = stored(kv, np.dtype(np.uint8))
    parts = blocks.reshape(*kv.shape[:-1], -1, 34)
    products = [
        [np.float32(d) * np.float32(q) for q in block[2:].view(np.int8)]
        for block in parts.reshape(-1, 34)
        for d in block[:2].view("<f2")
    ]
    widened = np.array(products, np.float32).reshape(kv.shape)
    params = {
        "q": queries(5, 3, 4, 64).reshape(3, -1), "page_table": page_table,
        "query": np.array([(0, 1, 129, 0), (0, 0, 0, 0), (0, 1, 64, 0)], np.int32), "heads": 4,
        "kv_heads": 2, "head_dim": 64, "scale": 0.125, "window": 70,
    }  # fmt: skip
    got = flash_attn_batched(kv=blocks, **params)
    assert np.isfinite(got).all()
    assert (got == flash_attn_batched(kv=widened, **params)).all()
    assert (got != flash_attn_batched(kv=kv, **params)).any()


@pytest.mark.parametrize("element", [np.float32, np.float16])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 70])
def test_close_to_binary64_softmax(element, soft_cap, window):
    """Several slots, grouped heads, windows, soft caps: another formula, so a bound."""
    heads, kv_heads, head_dim = 6, 2, 64
    sequences = [
        random_sequence(seed, length, kv_heads, head_dim, element)
        for seed, length in enumerate((1, 65, 200))
    ]
    tokens = [(0, 0), (2, 198), (1, 64), (2, 199), (1, 30)]
    q = queries(3, len(tokens), heads, head_dim)
    got = attend(sequences, tokens, q, heads, scale=0.125, window=window, soft_cap=soft_cap)
    for row, (slot, position) in enumerate(tokens):
        first = max(0, position + 1 - window) if window else 0
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            visible = slice(first, position + 1)
            exact = softmax_attention(
                q[row, head],
                sequences[slot].keys[visible, kv_head],
                sequences[slot].values[visible, kv_head],
                0.125,
                soft_cap,
            )
            assert np.abs(got[row, head] - exact).max() < ABSOLUTE


def test_span_of_many_tiles():
    """Every bit of queries whose spans hold one, several and all tiles."""
    sequence = random_sequence(3, 2200, 1, 16)
    positions = [1023, 1024, 1100, 2047, 2199]
    q = queries(7, len(positions), 1, 16)
    for window in (0, 1000):
        got = attend([sequence], [(0, p) for p in positions], q, 1, scale=0.3, window=window)
        for row, position in enumerate(positions):
            first = max(0, position + 1 - window) if window else 0
            keys, values = sequence.keys[: position + 1, 0], sequence.values[: position + 1, 0]
            assert got[row, 0].tolist() == scalar_attention(q[row, 0], keys, values, first, 0.3)


@pytest.mark.parametrize("soft_cap", [0.0, 4.0])
@pytest.mark.parametrize("sink", [None, -2.0, 0.75, 31.0, 1e5, 1e7, np.nan, -np.inf])
def test_scalar_rule_with_cap_and_sinks(soft_cap, sink):
    """Every bit, sinks that break their query included; the other head has a sink of zero."""
    sequence = random_sequence(5, 70, 1, 16)
    q = queries(2, 1, 2, 16)
    sinks = None if sink is None else np.array([sink, 0.0], np.float32)
    got = attend([sequence], [(0, 69)], q, 2, scale=0.3, soft_cap=soft_cap, sinks=sinks)
    keys, values = sequence.keys[:, 0], sequence.values[:, 0]
    for head, own in enumerate((None, None) if sinks is None else sinks.tolist()):
        expected = scalar_attention(q[0, head], keys, values, 0, 0.3, soft_cap, own)
        np.testing.assert_array_equal(got[0, head], expected)


def test_sink_takes_weight_from_the_values():
    """Against binary64: one more score in the sum, none in the values."""
    sequence = random_sequence(6, 90, 1, 32)
    q = queries(4, 1, 1, 32)
    sinks = np.array([1.5], np.float32)
    got = attend([sequence], [(0, 89)], q, 1, scale=0.2, sinks=sinks)[0, 0]
    scores = sequence.keys[:, 0].astype(np.float64) @ q[0, 0].astype(np.float64) * np.float32(0.2)
    weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(1.5))
    assert np.abs(got - weights @ sequence.values[:, 0]).max() < ABSOLUTE


@pytest.mark.parametrize("factor", [2.0**-45, 2.0**-30, 1.0, 2.0**15, 2.0**39, 2.0**41])
def test_rows_of_every_size(factor):
    """Every bit of keys that are zero, tiny, large and broken by their size."""
    sequence = random_sequence(9, 66, 1, 16)
    keys = sequence.keys.copy()
    keys[7] *= np.float32(factor)
    values = sequence.values.copy()
    values[9] *= np.float32(factor)
    q = queries(8, 1, 1, 16)
    got = attend([Sequence(keys, values)], [(0, 65)], q, 1, scale=0.3)
    expected = scalar_attention(q[0, 0], keys[:, 0], values[:, 0], 0, 0.3)
    np.testing.assert_array_equal(got[0, 0], expected)
    assert np.isnan(got).all() == (factor >= 2.0**39)


@pytest.mark.parametrize("position", [0, 40, 64])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 2.0**40])
def test_broken_rows_break_their_head_only(position, poison):
    """A key of one KV head, a value of the other, and no query that cannot see them."""
    sequence = random_sequence(4, 66, 3, 16)
    sequence.keys[position, 0, 3] = poison
    sequence.values[position, 1, 5] = poison
    tokens = [(0, p) for p in (position - 1, position, 65) if p >= 0]
    q = queries(1, len(tokens), 6, 16)
    got = attend([sequence], tokens, q, 6, scale=0.3)
    for row, (_, at) in enumerate(tokens):
        broken = np.isnan(got[row]).all(axis=1)
        assert broken.tolist() == [at >= position] * 4 + [False] * 2
        assert np.isfinite(got[row][~broken]).all()


def test_broken_query_breaks_its_head_only():
    """NaN in that head of that token."""
    sequence = random_sequence(4, 66, 1, 16)
    q = queries(1, 2, 2, 16)
    q[1, 0, 3] = np.inf
    got = attend([sequence], [(0, 3), (0, 65)], q, 2, scale=0.3)
    assert np.isnan(got[1, 0]).all()
    assert np.isfinite(got[0]).all()
    assert np.isfinite(got[1, 1]).all()


def test_window_of_one_returns_the_value():
    """One weight: the value as its row's integers tell it, to 13 bits."""
    sequence = random_sequence(8, 80, 1, 16)
    got = attend([sequence], [(0, 79)], queries(1, 1, 1, 16), 1, scale=0.25, window=1)
    value = sequence.values[79, 0]
    assert np.abs(got[0, 0] - value).max() <= np.abs(value).max() * 2.0**-10


def test_equal_scores_average_the_values():
    """A zero query weighs 128 positions alike."""
    rng = np.random.default_rng(2)
    values = rng.integers(-8, 8, (128, 1, 16)).astype(np.float32)
    sequence = Sequence(rng.standard_normal((128, 1, 16), dtype=np.float32), values)
    got = attend([sequence], [(0, 127)], np.zeros((1, 1, 16), np.float32), 1, scale=1.0)
    assert np.abs(got[0, 0] - values[:, 0].mean(axis=0)).max() < 8 * 2.0**-12


def test_page_order_and_neighbours_change_nothing():
    """The same token in another pool, beside other tokens, has the same bits."""
    sequences = [random_sequence(seed, 100, 2, 40) for seed in range(3)]
    q = queries(4, 3, 4, 40)
    together = attend(sequences, [(0, 99), (1, 64), (2, 63)], q, 4, scale=0.2)
    for slot, position in ((0, 99), (1, 64), (2, 63)):
        alone = attend([sequences[slot]], [(0, position)], q[slot : slot + 1], 4, scale=0.2)
        assert (alone[0] == together[slot]).all()
