"""LOAD_REQUEST_STATE: a step's query tokens as ids, and the recent tokens of their slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.records import LAST_TOKEN, QUERY_TOKEN, SLOT


def load_request_state(
    *, query: NDArray[np.int32], slot_table: NDArray[np.int32], recent: NDArray[np.int32]
) -> NDArray[np.int32]:
    """``query`` [tokens, 4] (QUERY_TOKEN) with every LAST_TOKEN replaced by its slot's.

    ``slot_table`` is [slots, 8] (SLOT). A slot whose last token is none (-1, its logits were not
    finite) goes on with token 0: its sequence has ended, and nobody looks at what follows. The
    tokens are noted in ``recent`` [slots, n], in place.
    """
    resolved = query.copy()
    records = resolved.view(QUERY_TOKEN)[:, 0]
    last = slot_table.view(SLOT)["last_token"][:, 0]
    for record in records:
        if record["token"] == LAST_TOKEN:
            record["token"] = max(last[record["slot"]], 0)
        recent[record["slot"], record["position"] % recent.shape[1]] = record["token"]
    return resolved
