"""LOAD_REQUEST_STATE: one word of a slot's record, the one the record layout says."""

from __future__ import annotations

import numpy as np

from contract.records import SLOT
from reference.ops.load_request_state import load_request_state


def test_reads_the_named_field() -> None:
    """Through the structured layout and through words, the same."""
    table = np.zeros(5, SLOT)
    table["last_token"] = [10, 11, 12, 13, 14]
    table["position"] = [1, 2, 3, 4, 5]
    words = table.view(np.int32).reshape(5, -1)
    slots = np.array([4, 0, 0], np.int32)
    for name in ("last_token", "position"):
        field = SLOT.fields[name][1] // 4
        got = load_request_state(slot_ids=slots, slot_table=words, field=field)
        assert got.tolist() == table[name][slots].tolist()
