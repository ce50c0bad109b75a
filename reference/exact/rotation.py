"""Rule R13: the fixed rotation of heads, by signs and a Walsh-Hadamard transform of blocks.

A head is cut into blocks of the largest power of two that divides its size. Every sum and the last
product are one rounding each, in a fixed order."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import HEAD_DIM_MAX, ROTATION_LEAST_EXPONENT, rotation_block
from reference.exact.philox import philox

Float32 = NDArray[np.float32]

LEAST = np.float32(2.0**ROTATION_LEAST_EXPONENT)


@cache
def signs(head_dim: int) -> Float32:
    """1 or -1 for every channel of a head: bit i mod 32 of word i / 32 of Philox4x32-10, key 0."""
    counters = range(-(-HEAD_DIM_MAX // 128))
    words = [w for counter in counters for w in philox((0, 0), (counter, 0, 0, 0))]
    bits = [words[i // 32] >> i % 32 & 1 for i in range(head_dim)]
    return np.where(bits, np.float32(-1), np.float32(1))


@cache
def unit(head_dim: int) -> np.float32:
    """1 / sqrt(block), rounded once."""
    return np.float32(1.0 / np.sqrt(np.float64(rotation_block(head_dim))))


def rotated(x: Float32) -> Float32:
    """The rotation of heads f32 [..., head_dim]: channels times their signs, then the transform."""
    return _transformed(_large(x) * signs(x.shape[-1]))


def rotated_back(x: Float32) -> Float32:
    """The inverse of ``rotated``: the transform, then channels times their signs."""
    return _transformed(_large(x)) * signs(x.shape[-1])


def _large(x: Float32) -> Float32:
    """``x`` with +0 for magnitudes below 2^-64, so that no sum is a subnormal number."""
    return np.where(np.abs(x) < LEAST, np.float32(0.0), x)


@np.errstate(invalid="ignore", over="ignore")
def _transformed(x: Float32) -> Float32:
    """Pairs of channels (i, i + h) become their sum and difference, for h = 1, 2, 4, ... below the
    size of a block; then each channel is multiplied by ``unit``."""
    size, half = rotation_block(x.shape[-1]), 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        half *= 2
    return x * unit(x.shape[-1])
