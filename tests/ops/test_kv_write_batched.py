"""KV_WRITE_BATCHED: where a token's key and value go, and how binary16 stores them."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dtypes import I12
from reference.exact.attention_rows import row_integers
from reference.exact.kv_storage import integers, loaded, loaded_rows, page_view, store, stored
from reference.ops.kv_write_batched import kv_write_batched

PAGE = 16
HALF_MAX = Fraction(65504)


def nearest_half(x: Fraction) -> Fraction:
    """Round an exact value to binary16, ties to even, saturating (rule R1)."""
    magnitude = abs(x)
    if not magnitude:
        return magnitude
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - 10, -24)
    rounded = min(round(magnitude / quantum) * quantum, HALF_MAX)
    return rounded if x > 0 else -rounded


def write_one(value: float, dtype: type[np.floating]) -> np.floating:
    """What a page holds after a key of ``value`` was written."""
    kv = np.zeros((1, 2, PAGE, 1, 1), dtype)
    x = np.array([[value]], np.float32)
    kv_write_batched(
        k=x, v=x, query=np.array([[0, 0, 3, 0]], np.int32), page_table=np.zeros((1, 1), np.int32),
        kv=kv, kv_heads=1, head_dim=1,
    )  # fmt: skip
    np.testing.assert_array_equal(kv[0, 0], kv[0, 1])
    return kv[0, 0, 3, 0, 0]


@given(value=st.floats(-65504.0, 65504.0, width=16) | st.floats(-(2.0**20), 2.0**20, width=32))
def test_half_is_nearest_even_and_saturates(value):
    """Against exact rational rounding."""
    assert Fraction(float(write_one(value, np.float16))) == nearest_half(Fraction(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (65504.0, 65504.0), (65519.0, 65504.0), (65520.0, 65504.0), (-1e30, -65504.0),
        (np.inf, 65504.0), (2.0**-24, 2.0**-24), (2.0**-25, 0.0), (1.0 + 2.0**-11, 1.0),
        (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),
    ],
)  # fmt: skip
def test_half_special_points(value, expected):
    """Saturation, the smallest subnormal, ties."""
    assert write_one(value, np.float16) == expected


def test_nan_is_not_saturated_away():
    """A broken key stays visibly broken."""
    assert np.isnan(write_one(np.nan, np.float16))
    assert np.isnan(write_one(np.nan, np.float32))


BYTES = np.dtype(np.uint8)
LARGEST = st.floats(-(2.0**30), 2.0**30, width=32)


@given(values=st.lists(st.floats(-1000.0, 1000.0, width=32) | LARGEST, min_size=32, max_size=32))
def test_q8_0_is_the_rule_in_rationals(values):
    """d rounds twice, amax / 127 to binary32 and to binary16; q is the rounded quotient."""
    block = stored(np.array(values, np.float32), BYTES)
    most = Fraction(float(np.float32(max(map(abs, values))) / np.float32(127)))
    d = nearest_half(most)
    assert Fraction(float(block[:2].view("<f2")[0])) == d
    for value, q in zip(values, block[2:].view(np.int8).tolist(), strict=True):
        quotient = float(np.float32(value) / np.float32(float(d))) if d else 0.0
        assert q == max(-127, min(127, round(quotient)))


@given(values=st.lists(st.floats(-60000.0, 60000.0, width=32), min_size=32, max_size=32))
def test_q8_0_is_within_a_step_of_the_value(values):
    """Half a step of d, and what rounding d to 11 bits costs the largest value."""
    x = np.array(values, np.float32)
    block = stored(x, BYTES)
    d = float(block[:2].view("<f2")[0])
    error = np.abs(loaded_rows(block).astype(np.float64) - x)
    assert (error <= d * (0.5 + 127 * 2.0**-11) + 127 * 2.0**-25).all()


@pytest.mark.parametrize(
    ("largest", "d", "q"),
    [
        (0.0, 0.0, 0), (127.0, 1.0, 127), (-127.0, 1.0, -127), (127 * 2.0**-25, 0.0, 0),
        (127 * 2.0**-24, 2.0**-24, 127), (127 * 1.4 * 2.0**-24, 2.0**-24, 127),
        (1e30, 65504.0, 127), (np.nan, np.nan, 0), (np.inf, np.nan, 0), (-np.inf, np.nan, 0),
    ],
)  # fmt: skip
def test_q8_0_special_points(largest, d, q):
    """Nothing, exact blocks, the edge of binary16's subnormals, saturation, broken values."""
    block = stored(np.array([largest] + [0.0] * 31, np.float32), BYTES)
    np.testing.assert_array_equal(block[:2].view("<f2"), np.array([d], "<f2"))
    assert block[2:].view(np.int8).tolist() == [q] + [0] * 31
    if not np.isfinite(d):
        assert block[:2].tolist() == [0x00, 0x7E]
        assert np.isnan(loaded_rows(block)).all()


def test_q8_0_breaks_only_the_block_that_holds_the_nan():
    """The other blocks of the row, the other row and the other positions stay as they were."""
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 2, 96), dtype=np.float32)
    k[1, 40] = np.nan
    kv = np.full((3, 2, PAGE, 3, 34), 0xFF, np.uint8)
    query = np.array([(0, 0, 5, 0), (0, 0, 17, 0)], np.int32)
    page_table = np.array([[2, 0]], np.int32)
    kv_write_batched(k=k, v=v, query=query, page_table=page_table, kv=kv, kv_heads=3, head_dim=32)
    written = np.zeros(kv.shape, bool)
    written[2, :, 5] = written[0, :, 1] = True
    assert (kv[~written] == 0xFF).all()
    assert np.isnan(loaded(kv)[0, 0, 1]).all(axis=1).tolist() == [False, True, False]
    assert (loaded(kv)[2, 1, 5].ravel() == loaded_rows(stored(v[0], BYTES))).all()


ROWS = st.lists(
    st.floats(-(2.0**41), 2.0**41, width=32) | st.sampled_from([np.nan, np.inf, -0.0, 2.0**-41]),
    min_size=6,
    max_size=6,
)


@given(k=ROWS, v=ROWS)
def test_i12_keeps_what_the_rule_makes_of_a_row(k, v):
    """Written and read back, a row has the integers it had before; a broken one is NaN."""
    kv = page_view(np.zeros(2 * 32 * 10, np.uint8), I12, (2, 2, PAGE, 1, 6))
    rows = np.array([[k]], np.float32), np.array([[v]], np.float32)
    store(kv, np.array([1], np.int32), np.array([3], np.int32), *rows)
    for which, x in enumerate(rows):
        expected = row_integers(x[0, 0], 10)
        got = loaded(kv)[1, which, 3, 0]
        assert np.isnan(got).all() == bool(expected.broken)
        again = row_integers(got, 10)
        assert (again.m.tolist(), again.exponent) == (expected.m.tolist(), expected.exponent)
        direct = integers(kv)[1, which, 3, 0]
        assert (direct.m.tolist(), direct.exponent) == (expected.m.tolist(), expected.exponent)


def test_i12_bytes_of_a_page():
    """Where the high bytes, the halves and the exponents of one token are; nothing else moves."""
    k = np.array([[[1.0, -1.999, 0.5, 0.001]], [[2.0**-50, 0, 0, 0]]], np.float32).repeat(2, axis=1)
    v = np.array([[[-3.0, 2.0, 0.25, 1.0]], [[np.nan, 0, 0, 0]]], np.float32).repeat(2, axis=1)
    v[:, 1] = 4 * v[:, 0]
    kv = page_view(np.full(3 * 32 * 14, 0x55, np.uint8), I12, (3, 2, PAGE, 2, 4))
    store(kv, np.array([2, 0], np.int32), np.array([5, 15], np.int32), k, v)
    page = kv[2, 0].tobytes()
    assert len(page) == 16 * (3 * 4 + 2)
    high, low, v_high, v_low, exponents = (0, 64, 96, 160, 192)
    # 1024, -2047, 512 and 1: high bytes 64, -128, 32, 0; low halves 0, 1, 0, 1.
    assert page[high + 5 * 4 : high + 6 * 4] == bytes([64, 0x80, 32, 0])
    assert page[low + 5 * 2 : low + 6 * 2] == bytes([0x00, 0x11])
    # -1536, 1024, 128 and 512 with exponent 1, a channel every 16 bytes.
    assert page[v_high + 5 : v_low : 16] == bytes([0xA0, 64, 8, 32])
    assert page[v_low + 5 : exponents : 16] == bytes([0, 0])
    assert (page[exponents + 5], page[exponents + 16 + 5]) == (0, 1)
    assert kv[2, 1]["v_exponent"][5] == 3
    assert (kv[0, 0]["k_exponent"][15], kv[0, 0]["v_exponent"][15]) == (-40, -128)
    touched = np.count_nonzero(np.frombuffer(kv.tobytes(), np.uint8) != 0x55)
    assert touched == 2 * 2 * (3 * 4 + 2)


def test_pages_and_offsets():
    """Every token lands in its own page and offset; nothing else is touched."""
    rng = np.random.default_rng(6)
    tokens = [(1, 0), (1, 15), (1, 16), (0, 33), (2, 47), (0, 5)]
    page_table = rng.permutation(12)[:9].reshape(3, 3).astype(np.int32)
    kv = np.full((12, 2, PAGE, 2, 3), -7.0, np.float32)
    expected = kv.copy()
    k, v = rng.standard_normal((2, len(tokens), 6), dtype=np.float32)
    for index, (slot, position) in enumerate(tokens):
        page = page_table[slot, position // PAGE]
        expected[page, 0, position % PAGE] = k[index].reshape(2, 3)
        expected[page, 1, position % PAGE] = v[index].reshape(2, 3)
    query = np.array([(0, slot, position, 0) for slot, position in tokens], np.int32)
    kv_write_batched(k=k, v=v, query=query, page_table=page_table, kv=kv, kv_heads=2, head_dim=3)
    assert (kv == expected).all()
