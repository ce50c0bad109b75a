"""VERIFY_K against a plain loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contract.records import OUTPUT_EVENT, STEP
from reference.ops.verify_k import verify_k

ROWS = st.lists(st.integers(0, 9), unique=True, max_size=10).map(sorted)
BITS = st.lists(st.integers(0, 1), min_size=10, max_size=10)
SLOTS = st.lists(st.integers(0, 2), min_size=10, max_size=10).map(sorted)


@given(ROWS, BITS, BITS, SLOTS, st.integers(1, 6), st.sampled_from([0, 5, (1 << 32) - 2]))
def test_drafts_up_to_the_first_wrong_one_are_accepted(rows, sampled, given_, slots, most, first):
    query = np.array([(given_[n], slots[n], n, 0) for n in range(10)], np.int32)
    ring = np.full((16, 8), 7, np.int32)
    step = np.array([(10, len(rows), first, 0)], STEP).view(np.int32).reshape(1, 4)
    verify_k(
        token=np.array(sampled[: len(rows)], np.int32), output_rows=np.array(rows, np.int32),
        query=query, step=step, ring=ring, draft_tokens=most,
    )  # fmt: skip
    events = ring.view(OUTPUT_EVENT)[:, 0]
    for row, token in enumerate(rows):
        accepted = 0
        while (
            accepted < most
            and row + accepted + 1 < len(rows)
            and rows[row + accepted + 1] == token + accepted + 1
            and slots[token + accepted + 1] == slots[token]
            and sampled[row + accepted] == given_[token + accepted + 1]
        ):
            accepted += 1
        assert events[(first + row) % (1 << 32) % 16]["flags"] == accepted
    untouched = np.delete(ring, OUTPUT_EVENT.fields["flags"][1] // 4, axis=1)
    assert (untouched == 7).all()
