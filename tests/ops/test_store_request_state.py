"""STORE_REQUEST_STATE: writes one word of some slots and nothing else."""

from __future__ import annotations

import numpy as np

from contract.records import SLOT
from reference.ops.load_request_state import load_request_state
from reference.ops.store_request_state import store_request_state


def test_writes_only_the_named_field() -> None:
    """What is stored is loaded again; every other word stays."""
    words = np.arange(40, dtype=np.int32).reshape(5, 8)
    before = words.copy()
    field = SLOT.fields["last_token"][1] // 4
    slots, value = np.array([3, 1], np.int32), np.array([-5, 77], np.int32)
    store_request_state(slot_ids=slots, value=value, slot_table=words, field=field)
    assert load_request_state(slot_ids=slots, slot_table=words, field=field).tolist() == [-5, 77]
    words[slots, field] = before[slots, field]
    assert (words == before).all()
