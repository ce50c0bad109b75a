"""ROW_DIGEST: digests of rows of logits, eight words for every 1,024 logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import DIGEST_FAN, DIGEST_LEAVES, DIGEST_WORDS, SPAN, digest_words
from contract.arrays import Floats, Ints
from reference.exact.blake3 import digests

UInt32 = NDArray[np.uint32]
SMALLEST_NORMAL, INFINITY, MAGNITUDE = 0x00800000, 0x7F800000, 0x7FFFFFFF
NAN = np.uint32(0x7FC00000)


def row_digest(*, logits: Floats, digested: Ints) -> Ints:
    """The digests of the spans of each row (rule R12), int32[rows, words].

    ``logits`` is [rows, vocab]. A row whose ``digested`` is 0 gets zeros."""
    rows, vocab = logits.shape
    found = np.zeros((rows, digest_words(vocab)), np.uint32)
    for row in np.flatnonzero(digested):
        found[row] = span_digests(canonical_words(logits[row])).reshape(-1)
    return found.view(np.int32)


def canonical_words(row: Floats) -> UInt32:
    """The bits of each logit: +0 for zeros and subnormals, one NaN for all, padded with 0 to whole
    spans."""
    bits = np.ascontiguousarray(row).view(np.uint32)
    magnitude = bits & np.uint32(MAGNITUDE)
    words = np.zeros(-(-len(bits) // SPAN) * SPAN, np.uint32)
    flushed = np.where(magnitude < SMALLEST_NORMAL, np.uint32(0), bits)
    words[: len(bits)] = np.where(magnitude > INFINITY, NAN, flushed)
    return words


def span_digests(words: UInt32) -> UInt32:
    """The root of each span's tree, uint32[spans, 8].

    Leaf i is the digest of the words i, i + 16, i + 32 and so on of the span; node i of the four is
    that of the leaves i, i + 4, i + 8, i + 12; the root is that of the four nodes in order."""
    spans = len(words) // SPAN
    by_leaf = words.reshape(spans, -1, DIGEST_LEAVES).transpose(1, 0, 2)
    leaves = digests(by_leaf.reshape(-1, spans * DIGEST_LEAVES))
    by_node = leaves.reshape(DIGEST_WORDS, spans, DIGEST_FAN, DIGEST_FAN).transpose(2, 0, 1, 3)
    nodes = digests(by_node.reshape(-1, spans * DIGEST_FAN))
    by_root = nodes.reshape(DIGEST_WORDS, spans, DIGEST_FAN).transpose(2, 0, 1)
    return np.ascontiguousarray(digests(by_root.reshape(-1, spans)).T)
