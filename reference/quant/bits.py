"""How 4-, 5- and 6-bit integers are packed into the bytes of a block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def unpack_nibbles(packed: Bytes) -> Bytes:
    """uint8[..., n] -> uint8[..., 2n]: all low nibbles, then all high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack_nibbles(values: Bytes) -> Bytes:
    """The inverse of :func:`unpack_nibbles`."""
    half = values.shape[-1] // 2
    return values[..., :half] | values[..., half:] << 4


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
