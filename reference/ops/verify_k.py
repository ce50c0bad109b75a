"""VERIFY_K: counts the drafted tokens that the model agrees with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def verify_k(*, draft: NDArray[np.int32], target: NDArray[np.int32]) -> NDArray[np.int32]:
    """The length of the common prefix of each row of ``draft`` and ``target`` ([rows, k])."""
    agree = np.logical_and.accumulate(draft == target, axis=1)
    agreeing: NDArray[np.int32] = agree.sum(axis=1, dtype=np.int32)
    return agreeing
