"""The CPU tier's matrix product has the bits of the definition, however it is cut up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import Q4_1, Q4_K, Q6_K, Q8_0, WEIGHT_DTYPES
from reference.cpu.matmul import PreparedActivation, prepare_weight, prepared_matmul
from reference.quant.dot import matmul
from tests.quant.samples import (
    ACTIVATIONS,
    INTEGER_DTYPES,
    activations,
    columns_for,
    extreme_blocks,
    random_blocks,
)

PRODUCTS_MAX = 4_000_000
"""Multiplications one example may cost the definition."""


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left, right, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(WEIGHT_DTYPES), seed=st.integers(0, 2**32 - 1))
def test_prepared_product_is_the_definition(data, dtype, seed):
    """Any format, row length, number of rows and tokens, and nasty activations."""
    columns = data.draw(columns_for(dtype))
    rows = data.draw(st.sampled_from([1, 2, 5, 16, 17, 100, 200, 600, 800]))
    tokens = min(data.draw(st.integers(1, 130)), max(1, PRODUCTS_MAX // (rows * columns)))
    kind = data.draw(st.sampled_from(sorted(ACTIVATIONS)))
    blocks = random_blocks(dtype, rows, columns, seed)
    x = activations(kind, tokens, columns, seed)
    got = prepared_matmul(prepare_weight(dtype, blocks), x)
    assert got.shape == (tokens, rows)
    assert same(got, matmul(blocks, dtype, x))


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 9, 64, 130])
def test_many_tokens_and_full_tiles(dtype, tokens):
    """Every way a tile is walked, from one token to several token tiles of long vectors."""
    columns = 1280 if dtype.block_elements == 256 else 352
    blocks = random_blocks(dtype, 800, columns, seed=1)
    x = activations("gaussian", tokens, columns, seed=2)
    assert same(prepared_matmul(prepare_weight(dtype, blocks), x), matmul(blocks, dtype, x))


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["all largest", "largest integers"])
def test_extreme_magnitudes_stay_exact(dtype, kind):
    """The largest integers a format can hold: BLAS sums must not round."""
    blocks = extreme_blocks(dtype, 40, 1536)
    x = activations(kind, 3, 1536, seed=3)
    assert same(prepared_matmul(prepare_weight(dtype, blocks), x), matmul(blocks, dtype, x))


def test_binary64_is_used_only_where_digit_sums_need_it():
    """Q6_K's largest blocks pass 24 bits, and only they: Q4_K's and random ones do not."""
    weight = prepare_weight(Q6_K, extreme_blocks(Q6_K, 4, 256))
    assert all(tile.wide for tile in weight.tiles)
    for dtype, blocks in (
        (Q6_K, random_blocks(Q6_K, 64, 512, seed=4)),
        (Q4_K, extreme_blocks(Q4_K, 4, 256)),
    ):
        assert not any(tile.wide for tile in prepare_weight(dtype, blocks).tiles)


def test_digit_sums_without_the_wide_path_would_round():
    """Negative control: the measured bound is needed, binary32 sums of such a tile are wrong."""
    blocks = extreme_blocks(Q6_K, 64, 4096)
    rng = np.random.default_rng(5)
    blocks.reshape(64, -1, 210)[..., :128] = rng.integers(0, 256, (64, 16, 128), dtype=np.uint8)
    blocks.reshape(64, -1, 210)[..., 192:208] = 0x81
    x = np.full((1, 4096), 2047, np.float32)
    weight = prepare_weight(Q6_K, blocks)
    assert all(tile.wide for tile in weight.tiles)
    plane = weight.tiles[0].plane[:256].astype(np.float32)
    rounded = np.float32(2047) * np.ones((1, 256), np.float32) @ plane
    exact = 2047 * weight.tiles[0].plane[:256].astype(np.int64).sum(axis=0)
    assert (rounded[0] != exact.astype(np.float32)).any()
    assert same(prepared_matmul(weight, x), matmul(blocks, Q6_K, x))


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_a_token_does_not_depend_on_its_batch(dtype):
    """Row t of a batch of any size is the row computed alone."""
    columns = 1280
    weight = prepare_weight(dtype, random_blocks(dtype, 300, columns, seed=6))
    x = activations("one token NaN", 130, columns, seed=7)
    together = prepared_matmul(weight, x)
    for token in (0, 1, 64, 65, 66, 129):
        assert same(together[token : token + 1], prepared_matmul(weight, x[token : token + 1]))
    assert same(together[:33], prepared_matmul(weight, x[:33]))


@pytest.mark.parametrize("dtype", [Q4_1, Q4_K], ids=str)
def test_threads_change_no_bit(dtype):
    """One thread, two, and more than there are tiles."""
    weight = prepare_weight(dtype, random_blocks(dtype, 1700, 512, seed=8))
    assert len(weight.tiles) > 2
    x = activations("gaussian", 7, 512, seed=9)
    one = prepared_matmul(weight, x, threads=1)
    for threads in (2, 3, 16, None):
        assert same(prepared_matmul(weight, x, threads=threads), one)


def test_output_is_written_in_place_and_activations_are_shared():
    """``out`` may be a part of a larger array, and nothing around it is touched."""
    first = prepare_weight(Q4_1, random_blocks(Q4_1, 40, 576, seed=10))
    second = prepare_weight(Q8_0, random_blocks(Q8_0, 24, 576, seed=11))
    x = activations("gaussian", 3, 576, seed=12)
    shared = PreparedActivation(x)
    joined = np.full((3, 66), -7, np.float32)
    view = joined[:, :40]
    assert prepared_matmul(first, shared, view) is view
    prepared_matmul(second, shared, joined[:, 41:65])
    assert same(view, prepared_matmul(first, x))
    assert same(joined[:, 41:65], prepared_matmul(second, x))
    assert (joined[:, [40, 65]] == -7).all()


def test_scratch_of_earlier_calls_does_not_leak():
    """A NaN batch before a clean one leaves nothing behind, also in a short last segment."""
    weight = prepare_weight(Q4_1, random_blocks(Q4_1, 200, 1120, seed=13))
    x = activations("gaussian", 2, 1120, seed=14)
    clean = prepared_matmul(weight, x)
    prepared_matmul(weight, np.full((50, 1120), np.nan, np.float32))
    assert same(prepared_matmul(weight, x), clean)


def test_shapes_are_checked():
    """Activations of another width and a wrong output are refused; no tokens is fine."""
    weight = prepare_weight(Q8_0, random_blocks(Q8_0, 8, 64, seed=15))
    with pytest.raises(ValueError, match="64"):
        prepared_matmul(weight, np.zeros((1, 96), np.float32))
    with pytest.raises(ValueError, match="out must be"):
        prepared_matmul(weight, np.zeros((1, 64), np.float32), np.zeros((2, 8), np.float32))
    assert prepared_matmul(weight, np.zeros((0, 64), np.float32)).shape == (0, 8)


def test_prepared_weights_are_compact():
    """Unpacked integers and scales take at most 1.3 bytes a weight for 32-blocks."""
    weight = prepare_weight(Q4_1, random_blocks(Q4_1, 512, 1024, seed=16))
    assert weight.nbytes <= 1.3 * 512 * 1024
