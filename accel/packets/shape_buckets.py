"""The forms steps are lowered as: what is decided once for all steps of about one size."""

from __future__ import annotations

from collections.abc import Sequence

from contract.shape_key import ShapeKey

SPLIT_TOKENS = 4
"""Attention of at most this many tokens divides the tiles of the context among workers."""
FEW = 12
"""Tokens of a step whose rows of usual widths are still cheap enough to be computed repeatedly."""


def shape_buckets(
    largest: ShapeKey, counts: Sequence[int] = (1, SPLIT_TOKENS, FEW)
) -> tuple[ShapeKey, ...]:
    """One token, a few whose attention is split, a few whose small work is repeated, and all; or
    other ``counts`` of tokens, rising, and all."""
    smaller = (count for count in counts if count < largest.tokens)
    return (*(ShapeKey(count, min(count, largest.rows)) for count in smaller), largest)
