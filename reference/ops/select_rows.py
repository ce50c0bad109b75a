"""SELECT_ROWS: selects the tokens whose logits are computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def select_rows(*, x: NDArray[np.float32], output_rows: NDArray[np.int32]) -> NDArray[np.float32]:
    """y[r] = x[output_rows[r]]. Returns [rows, hidden]."""
    return x[output_rows]
