"""STORE_REQUEST_STATE: stores each sampled token as the last token of its slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.records import QUERY_TOKEN, SLOT


def store_request_state(
    *,
    token: NDArray[np.int32],
    output_rows: NDArray[np.int32],
    query: NDArray[np.int32],
    slot_table: NDArray[np.int32],
) -> None:
    """Store ``token`` [rows] and its position in ``slot_table`` [slots, 8] (SLOT), in place.

    ``output_rows`` [rows] holds the index in ``query`` [tokens, 4] (QUERY_TOKEN) of each row; of
    several rows of a slot the last one counts."""
    queries, slots = query.view(QUERY_TOKEN)[:, 0], slot_table.view(SLOT)[:, 0]
    for sampled, row in zip(token, output_rows, strict=True):
        slot = slots[queries[row]["slot"]]
        slot["last_token"] = sampled
        slot["position"] = queries[row]["position"] + 1
