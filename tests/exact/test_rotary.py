"""Rotary frequencies and tables against arbitrary-precision arithmetic."""

import math

import numpy as np
import pytest
from mpmath import mp, mpf

from reference.exact.rotary import (
    BLOCK_ANGLES,
    MAX_ANGLE,
    RotaryScaling,
    frequencies,
    rotary_table,
    sine_cosine,
)

DIGITS = 80
ANGLES = 20_000
BINARY64_ERROR = 2.0**-52
MISSES = 0
"""Sines and cosines that differ from the correctly rounded binary32 value, of 2 x ANGLES."""


@pytest.fixture(autouse=True)
def _precision() -> None:
    mp.dps = DIGITS


def nearest_double(x: mpf) -> float:
    """Correct rounding to binary64 by mpmath's own conversion at 53 bits."""
    with mp.workprec(53):
        return float(+x)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 160_000.0, 1e7])
@pytest.mark.parametrize("rotary_dim", [16, 40, 64, 80, 96, 128, 256])
def test_frequencies_are_correctly_rounded(base, rotary_dim):
    """base^(-2m/D) for every pair."""
    exact = [
        nearest_double(mpf(base) ** (mpf(-2 * m) / rotary_dim)) for m in range(rotary_dim // 2)
    ]
    assert frequencies(base, rotary_dim).tolist() == exact


def test_sine_and_cosine_round_correctly_to_binary32():
    """Random angles over the whole range, small ones and neighbours of multiples of pi/2."""
    rng = np.random.default_rng(77)
    angle = np.concatenate(
        [
            rng.uniform(0, 1.0, ANGLES // 4),
            rng.uniform(0, 4096.0, ANGLES // 4),
            rng.uniform(-MAX_ANGLE, MAX_ANGLE, ANGLES // 4),
            rng.integers(0, 600_000, ANGLES // 4) * (math.pi / 2)
            + rng.uniform(-1e-6, 1e-6, ANGLES // 4),
        ]
    )
    mp.dps = 40
    sine, cosine = sine_cosine(angle)
    exact_sine = np.array([float(mp.sin(mpf(a))) for a in angle]).astype(np.float32)
    exact_cosine = np.array([float(mp.cos(mpf(a))) for a in angle]).astype(np.float32)
    misses = (sine.astype(np.float32) != exact_sine).sum()
    misses += (cosine.astype(np.float32) != exact_cosine).sum()
    assert misses <= MISSES


def test_sine_and_cosine_in_binary64():
    """The error bound the docstring states, over the whole range."""
    rng = np.random.default_rng(78)
    angle = rng.uniform(-MAX_ANGLE, MAX_ANGLE, 2000)
    sine, cosine = sine_cosine(angle)
    for a, s, c in zip(angle, sine, cosine, strict=True):
        assert abs(mpf(float(s)) - mp.sin(mpf(a))) <= BINARY64_ERROR
        assert abs(mpf(float(c)) - mp.cos(mpf(a))) <= BINARY64_ERROR


def test_exact_angles():
    """Zero is exact and keeps cosine 1."""
    sine, cosine = sine_cosine(np.array([0.0]))
    assert (sine[0], cosine[0]) == (0.0, 1.0)


def test_table_is_the_rounded_sine_and_cosine_of_position_times_frequency():
    """Layout [context, 2, pairs], cosines first."""
    table = rotary_table(300, 10_000.0, 16)
    assert table.shape == (300, 2, 8)
    frequency = frequencies(10_000.0, 16)
    for position in (0, 1, 63, 299):
        for pair in range(8):
            angle = mpf(position * float(frequency[pair]))
            assert table[position, 0, pair] == np.float32(float(mp.cos(angle)))
            assert table[position, 1, pair] == np.float32(float(mp.sin(angle)))


@pytest.mark.parametrize("dims", [2, 48, 128])
def test_a_table_in_blocks_is_the_table_at_once(dims):
    """Two blocks and a part of one, whose last positions are no multiple of anything."""
    context = 2 * (BLOCK_ANGLES // (dims // 2)) + 7
    angle = np.arange(context, dtype=np.float64)[:, None] * frequencies(10_000.0, dims)
    sine, cosine = sine_cosine(angle)
    table = rotary_table(context, 10_000.0, dims)
    assert np.array_equal(table, np.stack([cosine, sine], axis=1).astype(np.float32))


def test_linear_scaling_divides_the_frequency():
    """factor 2: position 2p is where p was, the factor being a power of two."""
    plain = rotary_table(100, 10_000.0, 32)
    scaled = rotary_table(200, 10_000.0, 32, RotaryScaling(factor=2.0))
    assert (scaled[::2] == plain).all()


def test_attention_factor_multiplies_both_before_rounding():
    plain = rotary_table(16, 10000.0, 8, RotaryScaling(factor=2.0))
    scaled = rotary_table(16, 10000.0, 8, RotaryScaling(factor=2.0, attention_factor=1.25))
    assert not np.array_equal(plain, scaled)
    assert np.abs(scaled - 1.25 * plain).max() <= 2.0**-22
    assert np.array_equal(scaled[0, 0], np.full(4, 1.25, np.float32))


def test_frequency_factors_divide_one_by_one():
    """A factor of 1 leaves a pair as it is; 4 slows it down by an exact power of two."""
    plain = rotary_table(64, 10_000.0, 8)
    table = rotary_table(256, 10_000.0, 8, factors=[1.0, 4.0, 1.0, 1.0])
    assert (table[:64, :, [0, 2, 3]] == plain[:, :, [0, 2, 3]]).all()
    assert (table[::4, :, 1] == plain[:, :, 1]).all()


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    """NTK by parts: the fastest pair turns as before, the slowest by 1/factor; both scaled."""
    scaling = RotaryScaling(factor=4.0, yarn=True, original_context=4096)
    table = rotary_table(64, 10_000.0, 128, scaling).astype(np.float64)
    magnitude = 1.0 + 0.1 * math.log(4.0)
    frequency = frequencies(10_000.0, 128)
    position = np.arange(64)
    fastest = np.cos(position * frequency[0]) * magnitude
    slowest = np.sin(position * frequency[-1] / 4.0) * magnitude
    assert np.abs(table[:, 0, 0] - fastest).max() < 1e-7
    assert np.abs(table[:, 1, -1] - slowest).max() < 1e-7


def test_angles_beyond_the_reduction_are_refused():
    """A wrong table is never made."""
    with pytest.raises(ValueError, match="exceeds"):
        rotary_table(1 << 21, 10_000.0, 16)
