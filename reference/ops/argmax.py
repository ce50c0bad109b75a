"""ARGMAX: the most likely token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
"""What a row with a NaN or an infinite logit yields instead of a token."""


def argmax(*, logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """The lowest id among the largest logits of each row (rule R9); NO_TOKEN if not all finite."""
    finite = np.isfinite(logits).all(axis=1)
    best = np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1)
    return np.where(finite, best, NO_TOKEN).astype(np.int32)
