"""How integers of 1 to 6 bits are packed into the bytes of a block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_PAIR_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def unpack_nibbles(packed: Bytes) -> Bytes:
    """uint8[..., n] -> uint8[..., 2n]: all low nibbles, then all high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack_nibbles(values: Bytes) -> Bytes:
    """The inverse of :func:`unpack_nibbles`."""
    half = values.shape[-1] // 2
    return values[..., :half] | values[..., half:] << 4


def unpack_pairs(packed: Bytes) -> Bytes:
    """uint8[..., n, 32] -> uint8[..., n, 4, 32]: the bit pairs 0, 2, 4, 6 of each byte."""
    return packed[..., None, :] >> _PAIR_SHIFTS & 3


def pack_pairs(values: Bytes) -> Bytes:
    """The inverse of :func:`unpack_pairs`."""
    return np.asarray(np.bitwise_or.reduce(values << _PAIR_SHIFTS, axis=-2), np.uint8)


def unpack_bits(packed: Bytes) -> Bytes:
    """uint8[..., n] -> uint8[..., 8n], bit i of the little-endian number at place i."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def pack_bits(bits: Bytes) -> Bytes:
    """The inverse of :func:`unpack_bits`."""
    return np.packbits(bits, axis=-1, bitorder="little")


def unpack_six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 sub-block scales and minima of Q4_K and Q5_K: uint8[..., 12] -> two uint8[..., 8].

    For s < 4: sc = b[s] & 63, mn = b[s+4] & 63; for s >= 4: sc = (b[s+4] & 15) | (b[s-4] >> 6) << 4
    and mn = (b[s+4] >> 4) | (b[s] >> 6) << 4.
    """
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scales, minima


def pack_six_bit_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """The inverse of :func:`unpack_six_bit_scales`; values are 0..63."""
    first = scales[..., :4] | (scales[..., 4:] >> 4) << 6
    second = minima[..., :4] | (minima[..., 4:] >> 4) << 6
    third = (scales[..., 4:] & 15) | (minima[..., 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=-1)


def unpack_signed_scales(packed: Bytes) -> NDArray[np.int8]:
    """The 16 sub-block scales of Q3_K, -32..31: uint8[..., 12] -> int8[..., 16].

    Low bits: (s < 8 ? b[s] : b[s-8] >> 4) & 15; high bits: (b[8 + s%4] >> 2*(s/4)) & 3.
    """
    high = (packed[..., None, 8:] >> _PAIR_SHIFTS & 3).reshape(*packed.shape[:-1], 16)
    return (unpack_nibbles(packed[..., :8]) | high << 4).view(np.int8) - np.int8(32)


def pack_signed_scales(scales: NDArray[np.int8]) -> Bytes:
    """The inverse of :func:`unpack_signed_scales`."""
    raised = (scales + np.int8(32)).view(np.uint8)
    high = pack_pairs((raised >> 4).reshape(*raised.shape[:-1], 4, 4))
    return np.concatenate([pack_nibbles(raised & 15), high], axis=-1)
