"""Philox4x32-10 against the published known answers, and how a draw addresses it."""

import numpy as np
import pytest

from reference.exact.philox import draw, philox

ALL_ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES, ALL_ONES), (ALL_ONES, ALL_ONES, ALL_ONES, ALL_ONES),
     (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
"""Random123's kat_vectors: zeros, ones, the digits of pi."""


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN_ANSWERS)
def test_known_answers(key, counter, expected):
    """All four words of every published vector."""
    assert philox(key, counter) == expected


def test_draw_is_keyed_by_seed_and_counted_by_position():
    """Both halves of the seed matter; the position is the counter's first word."""
    assert draw(0, 0) == KNOWN_ANSWERS[0][2][0]
    assert draw(5 << 32 | 7, 9) == philox((7, 5), (9, 0, 0, 0))[0]
    assert len({draw(seed, position) for seed in (0, 1, 1 << 32) for position in (0, 1)}) == 6
    many = np.array([0, 9, ALL_ONES], np.uint64)
    assert draw(5 << 32 | 7, many).tolist() == [draw(5 << 32 | 7, int(one)) for one in many]


def test_draws_are_spread_evenly():
    """Chi-square of 4,096 consecutive positions in 16 bins stays below the 0.1 % point."""
    counts = [0] * 16
    for position in range(4096):
        counts[draw(1234, position) >> 28] += 1
    chi_square = sum((count - 256) ** 2 / 256 for count in counts)
    assert chi_square < 37.7
