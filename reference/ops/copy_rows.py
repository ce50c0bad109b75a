"""COPY_ROWS: copies rows of one buffer to another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def copy_rows(
    *, source: NDArray[np.float32], pairs: NDArray[np.int32], target: NDArray[np.float32]
) -> None:
    """target[pairs[r, 1]] = source[pairs[r, 0]], in place, bits unchanged.

    ``source`` is [sources, width], ``pairs`` [rows, 2] with distinct targets, ``target``
    [targets, width]."""
    target[pairs[:, 1]] = source[pairs[:, 0]]
