"""The Merkle tree over the digests of an answer's steps, as RFC 9162 defines it with SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LEAF, NODE = b"\0", b"\1"
"""Prefixes of digested bytes, so that a node is never equal to a leaf."""


def tree_root(leaves: Sequence[bytes]) -> bytes:
    """The Merkle root of ``leaves``; without leaves the digest of nothing."""
    if not leaves:
        return hashlib.sha256().digest()
    level = [hashlib.sha256(LEAF + leaf).digest() for leaf in leaves]
    while len(level) > 1:
        paired = [
            hashlib.sha256(NODE + left + right).digest()
            for left, right in zip(level[::2], level[1::2], strict=False)
        ]
        level = [*paired, *level[len(paired) * 2 :]]
    return level[0]
