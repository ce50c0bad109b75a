"""Philox4x32-10, the counter-based generator of rule R9 (Salmon et al., SC11)."""

from __future__ import annotations

from typing import TypeVar

from contract.arrays import Array

Word = TypeVar("Word", int, Array)
"""A 32-bit word, or an array of them in uint64."""

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF


def philox(
    key: tuple[int, int], counter: tuple[Word, Word, Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """The Philox function: four 32-bit words from a 64-bit key and a 128-bit counter, given as
    words, or from each of many counters."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        p0 = MULTIPLIER_0 * c0
        p1 = MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0 = (k0 + WEYL_0) & MASK
        k1 = (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def draw(seed: int, position: Word) -> Word:
    """The 32-bit random number that samples ``position`` under a 64-bit ``seed`` (rule R9)."""
    zero = position & 0
    return philox((seed & MASK, seed >> 32 & MASK), (position & MASK, zero, zero, zero))[0]
