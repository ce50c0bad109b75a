"""STORE_REQUEST_STATE: the sampled tokens and their positions, and nothing else of the table."""

import numpy as np

from contract.records import QUERY_TOKEN, SLOT
from reference.ops.store_request_state import store_request_state


def test_each_slot_keeps_its_last_row():
    """Rows in order, whatever tokens they belong to; slots without a row stay as they were."""
    words = np.arange(40, dtype=np.int32).reshape(5, 8)
    before = words.copy().view(SLOT)[:, 0]
    query = np.array([(9, 3, 6, 0), (9, 1, 2, 0), (9, 3, 7, 0), (9, 4, 0, 0)], QUERY_TOKEN)
    store_request_state(
        token=np.array([50, -1, 51], np.int32),
        output_rows=np.array([0, 1, 2], np.int32),
        query=query.view(np.int32).reshape(-1, 4),
        slot_table=words,
    )
    table = words.view(SLOT)[:, 0]
    assert table[["last_token", "position"]][[3, 1]].tolist() == [(51, 8), (-1, 3)]
    assert (table[[0, 2, 4]] == before[[0, 2, 4]]).all()
    others = [name for name in SLOT.names or () if name not in ("last_token", "position")]
    assert (table[others] == before[others]).all()
