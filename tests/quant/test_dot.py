"""The definition of a matrix product against exact rationals that follow the text of rule R5."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import IQ4_XS, Q6_K, Q8_0, StorageClass
from reference.exact.activation import quantize_activation
from reference.exact.sums import fold_axis, sum_axis
from reference.quant import FORMATS
from reference.quant.dot import matmul
from tests.quant import oracle
from tests.quant.samples import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    activations,
    columns_for,
    extreme_blocks,
    random_blocks,
)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(INTEGER_DTYPES), seed=st.integers(0, 2**32 - 1))
def test_definition_follows_the_text(data, dtype, seed):
    """Each output equals the rule evaluated with Python integers and one rounding per operation."""
    columns = data.draw(columns_for(dtype))
    kind = data.draw(st.sampled_from(["gaussian", "largest integers", "outlier", "huge", "zeros"]))
    blocks = random_blocks(dtype, 2, columns, seed)
    x = activations(kind, 1, columns, seed)
    got = matmul(blocks, dtype, x)
    for row in range(2):
        assert Fraction(float(got[0, row])) == oracle.dot(dtype, blocks[row], x[0])


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_magnitudes_do_not_overflow(dtype, sign):
    """All integers at their largest: int32 still holds every sum (the stated Bounds)."""
    columns = 2304
    blocks = extreme_blocks(dtype, 2, columns)
    x = np.full((1, columns), sign * 2047, np.float32)
    assert (np.abs(quantize_activation(x).m) == 2047).all()
    got = matmul(blocks, dtype, x)
    assert Fraction(float(got[0, 0])) == oracle.dot(dtype, blocks[0], x[0])


def test_the_stated_bounds_are_reached():
    """The extreme blocks are the worst case: J of Q6_K is 16*128*16*32*2047, just below 2^31."""
    block = extreme_blocks(Q6_K, 1, 256)[0].tobytes()
    q, scales, _, sub = oracle.super_block("q6_k", block)
    j = sum(abs(scales[i // sub] * q[i]) * 2047 for i in range(256))
    assert j == 16 * 128 * 16 * 32 * 2047
    assert j < 2**31
    block = extreme_blocks(IQ4_XS, 1, 256)[0].tobytes()
    q, scales, _, sub = oracle.super_block("iq4_xs", block)
    assert sum(abs(scales[i // sub] * q[i]) * 2047 for i in range(256)) == 256 * 32 * 127 * 2047
    assert 256 * 32 * 127 * 2047 < 2**31
    q, _, _ = oracle.block32("q8_0", extreme_blocks(Q8_0, 1, 32)[0].tobytes())
    assert sum(abs(value) for value in q) * 2047 == 32 * 128 * 2047


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 96, 256, 576, 2304])
def test_float_weights_are_rounded_products_summed_by_r4(dtype, columns):
    """F16 and BF16 weights are expanded exactly and then treated as F32."""
    blocks = random_blocks(dtype, 3, columns, seed=5)
    x = activations("gaussian", 4, columns, seed=6)
    values = FORMATS[dtype].dequantize(blocks)
    got = matmul(blocks, dtype, x)
    for token in range(4):
        for row in range(3):
            assert got[token, row] == sum_axis(values[row] * x[token])


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_the_product_is_accurate(dtype):
    """Quantizing activations costs well under a percent against binary64."""
    blocks = FORMATS[dtype].quantize(activations("gaussian", 64, 2304, seed=1))
    x = activations("gaussian", 4, 2304, seed=2)
    exact = x.astype(np.float64) @ FORMATS[dtype].dequantize(blocks).T.astype(np.float64)
    error = np.linalg.norm(matmul(blocks, dtype, x) - exact) / np.linalg.norm(exact)
    assert error < 1.5e-3


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_a_plain_product_differs(dtype):
    """Negative control: BLAS on the dequantized matrix does not give these bits."""
    blocks = random_blocks(dtype, 64, 2304, seed=3)
    x = activations("gaussian", 2, 2304, seed=4)
    assert (matmul(blocks, dtype, x) != x @ FORMATS[dtype].dequantize(blocks).T).any()


def test_folding_blocks_from_the_right_differs():
    """Negative control: the order of t_b inside a segment is part of the definition."""
    blocks = random_blocks(Q8_0, 64, 256, seed=8)
    x = activations("gaussian", 1, 256, seed=9)
    activation = quantize_activation(x)
    planes = FORMATS[Q8_0].unpack(blocks)
    products = planes.q.reshape(64, 8, 32).astype(np.int32) * activation.m.reshape(8, 32)
    terms = planes.scale * products.sum(axis=-1).astype(np.float32)

    def folded(order: range) -> np.ndarray:
        value = np.zeros(64, np.float32)
        for block in order:
            value = value + terms[:, block]
        return fold_axis((value * activation.scale[0])[:, None])

    definition = matmul(blocks, Q8_0, x)[0]
    assert np.array_equal(folded(range(8)), definition)
    assert (folded(range(7, -1, -1)) != definition).any()


@pytest.mark.parametrize("dtype", [*INTEGER_DTYPES, *FLOAT_DTYPES], ids=str)
def test_a_broken_token_disturbs_no_other(dtype):
    """NaN and infinity turn their own token's outputs to NaN, without a warning."""
    columns = 512 if dtype.storage is StorageClass.SUPERBLOCK else 576
    blocks = random_blocks(dtype, 9, columns, seed=12)
    x = activations("gaussian", 5, columns, seed=13)
    clean = matmul(blocks, dtype, x)
    x[2, 3], x[2, 5], x[4, 1] = np.inf, -np.inf, np.nan
    broken = matmul(blocks, dtype, x)
    assert np.array_equal(broken[[0, 1, 3]], clean[[0, 1, 3]])
    assert np.isnan(broken[4]).all()
    assert not np.isfinite(broken[2]).any()
    if dtype.storage is not StorageClass.FLOAT:
        assert np.isnan(broken[2]).all()


def test_tokens_are_independent():
    """A token of a batch has the bits it has alone."""
    for dtype in INTEGER_DTYPES:
        blocks = random_blocks(dtype, 7, 1280, seed=14)
        x = activations("outlier", 6, 1280, seed=15)
        together = matmul(blocks, dtype, x)
        for token in range(6):
            assert np.array_equal(together[token], matmul(blocks, dtype, x[token : token + 1])[0])
