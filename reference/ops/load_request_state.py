"""LOAD_REQUEST_STATE: read one word of the slot table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def load_request_state(
    *, slot_ids: NDArray[np.int32], slot_table: NDArray[np.int32], field: int
) -> NDArray[np.int32]:
    """value[r] = slot_table[slot_ids[r], field]."""
    return slot_table[slot_ids, field]
