"""VERIFY_K: counts the drafted tokens that the model agrees with."""

from __future__ import annotations

import numpy as np

from contract.arrays import Ints
from contract.records import OUTPUT_EVENT, QUERY_TOKEN, STEP


def verify_k(
    *, token: Ints, output_rows: Ints, query: Ints, step: Ints, ring: Ints, draft_tokens: int
) -> None:
    """Write into each row's event in ``ring`` ([ring_events, 8] words) how many drafted tokens
    behind the row's are right: each is the next of ``query`` and the one sampled before it."""
    events, first = ring.view(OUTPUT_EVENT)[:, 0], int(step.view(STEP)[0, 0]["first_event"])
    for row, accepted in enumerate(accepted_drafts(token, output_rows, query, draft_tokens)):
        events[((first + row) & 0xFFFFFFFF) % len(events)]["flags"] = accepted


def accepted_drafts(token: Ints, output_rows: Ints, query: Ints, draft_tokens: int) -> Ints:
    """int32[rows]: the drafted tokens after each row that are right, at most ``draft_tokens``."""
    queries, rows = query.view(QUERY_TOKEN)[:, 0], len(output_rows)
    right = np.zeros(rows + 1, np.bool_)
    here, behind = output_rows[:-1], output_rows[1:]
    drafts = queries[behind]
    of_slot = (behind == here + 1) & (drafts["slot"] == queries[here]["slot"])
    right[: max(0, rows - 1)] = of_slot & (drafts["token"] == token[:-1])
    wrong = np.flatnonzero(~right)
    run = wrong[np.searchsorted(wrong, np.arange(rows))] - np.arange(rows)
    accepted: Ints = np.minimum(run, draft_tokens).astype(np.int32)
    return accepted
