"""STORE_REQUEST_STATE: write one word of the slot table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def store_request_state(
    *,
    slot_ids: NDArray[np.int32],
    value: NDArray[np.int32],
    slot_table: NDArray[np.int32],
    field: int,
) -> None:
    """slot_table[slot_ids[r], field] = value[r], in place; ``slot_ids`` are distinct."""
    slot_table[slot_ids, field] = value
