"""BLAKE3 of many messages of one length, in 32-bit integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]

BLOCK_WORDS = 16
"""32-bit words of a block, which one compression takes in."""
MAX_BLOCKS = 16
"""Blocks of the longest message that is one chunk; longer ones are not needed here."""
IV = np.array(
    [
        *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
        *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
    ],
    np.uint32,
)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
"""Word i of a round's block is word PERMUTATION[i] of the round before."""
ROUNDS = 7
CHUNK_START, CHUNK_END, ROOT = 1, 2, 8


def digests(messages: UInt32) -> UInt32:
    """BLAKE3 of each column of uint32[words, n] as little-endian bytes, uint32[8, n]; ``words`` is
    1 to 16 whole blocks of 16."""
    words, n = messages.shape
    blocks, rest = divmod(words, BLOCK_WORDS)
    if rest or not 0 < blocks <= MAX_BLOCKS:
        raise ValueError(f"a message has 1 to {MAX_BLOCKS} blocks of 16 words, not {words} words")
    chain = np.repeat(IV[:, None], n, axis=1)
    for block in range(blocks):
        first, last = block == 0, block == blocks - 1
        flags = first * CHUNK_START | last * (CHUNK_END | ROOT)
        message = messages[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        chain = _compressed(chain, message, flags)
    return chain


def _compressed(chain: UInt32, message: UInt32, flags: int) -> UInt32:
    """The chaining values [8, n] after one block [16, n] of 64 bytes."""
    n = chain.shape[1]
    a, b = chain[:4].copy(), chain[4:].copy()
    c = np.repeat(IV[:4, None], n, axis=1)
    d = np.repeat(np.array([0, 0, 4 * BLOCK_WORDS, flags], np.uint32)[:, None], n, axis=1)
    room = np.empty_like(a)
    order = tuple(range(BLOCK_WORDS))
    for _ in range(ROUNDS):
        _mix(a, b, c, d, message[[*order[0:8:2]]], message[[*order[1:8:2]]], room)
        b, c, d = (np.roll(row, -by, axis=0) for by, row in enumerate((b, c, d), 1))
        _mix(a, b, c, d, message[[*order[8::2]]], message[[*order[9::2]]], room)
        b, c, d = (np.roll(row, by, axis=0) for by, row in enumerate((b, c, d), 1))
        order = tuple(order[index] for index in PERMUTATION)
    return np.concatenate([a ^ c, b ^ d])


def _mix(a: UInt32, b: UInt32, c: UInt32, d: UInt32, x: UInt32, y: UInt32, room: UInt32) -> None:
    """BLAKE3's G of four columns of each message at once, in place."""
    for words, by_d, by_b in ((x, 16, 12), (y, 8, 7)):
        a += b
        a += words
        d ^= a
        _turn(d, by_d, room)
        c += d
        b ^= c
        _turn(b, by_b, room)


def _turn(words: UInt32, right: int, room: UInt32) -> None:
    """Rotate every word to the right, in place."""
    np.left_shift(words, 32 - right, out=room)
    words >>= right
    words |= room
