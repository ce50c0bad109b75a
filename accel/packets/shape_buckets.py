"""The shape buckets a graph is lowered for, each for steps of about one size."""

from __future__ import annotations

from collections.abc import Sequence

from contract.shape_key import ShapeKey

SPLIT_TOKENS = 4
"""Most tokens for which attention divides the context among workers."""
FEW = 12
"""Most tokens for which rows of usual widths are cheap enough to compute repeatedly."""


def shape_buckets(
    largest: ShapeKey, counts: Sequence[int] = (1, SPLIT_TOKENS, FEW)
) -> tuple[ShapeKey, ...]:
    """The buckets for one token, for few tokens with divided attention, for few tokens with
    repeated small work, and for ``largest``; or for other ascending ``counts`` of tokens and for
    ``largest``."""
    smaller = (count for count in counts if count < largest.tokens)
    return (*(ShapeKey(count, min(count, largest.rows)) for count in smaller), largest)
