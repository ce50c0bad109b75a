"""Turns the hidden states of a text into one vector (rule R11).

The states are the normed rows of binary32 that logits are computed from, the same bits on every
tier. All further arithmetic is binary64, and each operation rounds once, by IEEE 754:

1. MEAN adds the rows in order of position, and divides each sum by their number; FIRST and LAST
take one row. 2. With ``dimensions`` only the first numbers are kept. 3. The squares are summed
exactly and rounded once (``math.fsum``). Each number is divided by the square root of the sum and
rounded to binary32. A zero vector stays zero.

So the order of additions does not depend on chunks, other requests or the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats
from contract.errors import UnsupportedModel
from reference.model.open import Model


class Pooling(Enum):
    """Which hidden states make the vector of a text."""

    MEAN = "mean"
    FIRST = "first"
    LAST = "last"


TYPES = {0: Pooling.MEAN, 1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}
"""The values of ``ARCHITECTURE.pooling_type`` in a file; 0 means unspecified."""


def pooling_of(model: Model) -> Pooling:
    """The pooling that a model's file names. Raises UnsupportedModel for a pooling without a
    vector."""
    key = f"{model.config.architecture}.pooling_type"
    kind = model.file.metadata.get(key, 0)
    if type(kind) is not int or kind not in TYPES:
        raise UnsupportedModel(model.file.path, key, f"is {kind!r}, which makes no embedding")
    return TYPES[kind]


def tokens_to_embed(model: Model, tokens: Sequence[int], of_text: bool) -> Sequence[int]:
    """The tokens to embed: with the end token if they are ``of_text`` and the model was trained
    with it."""
    end = model.tokenizer.eos_id
    adds = model.file.metadata.get("tokenizer.ggml.add_eos_token") is True
    return [*tokens, end] if of_text and adds and end is not None else tokens


class Pool:
    """Computes the vector of one text. Call it with the rows of hidden states in order."""

    def __init__(self, pooling: Pooling, tokens: int) -> None:
        self.pooling = pooling
        self._tokens = tokens
        self._sum: NDArray[np.float64] | None = None

    @property
    def rows_from(self) -> int:
        """The first position whose row is needed."""
        return self._tokens - 1 if self.pooling is Pooling.LAST else 0

    def __call__(self, first: int, rows: Floats) -> None:
        """Take the rows of the positions from ``first`` on, float32[positions, hidden]."""
        for position, row in enumerate(rows, first):
            if self.pooling is not Pooling.MEAN and position != self._requested:
                continue
            wide = row.astype(np.float64)
            self._sum = wide if self._sum is None else self._sum + wide

    def note(self, other: Pool) -> None:
        """Take over the state of another pool of the same text."""
        self._sum = other._sum

    def vector(self, dimensions: int | None = None) -> Floats:
        """The normalised vector, float32[dimensions]; the full width for None. Raises ValueError
        for a hidden state that is not finite."""
        assert self._sum is not None, "no row came"
        count = self._tokens if self.pooling is Pooling.MEAN else 1
        mean = (self._sum / count)[:dimensions]
        if not np.isfinite(mean).all():
            raise ValueError("a hidden state is not finite")
        length = math.sqrt(math.fsum((mean * mean).tolist()))
        return (mean / length if length else mean).astype(np.float32)

    @property
    def _requested(self) -> int:
        return 0 if self.pooling is Pooling.FIRST else self._tokens - 1
