"""LOAD_REQUEST_STATE: fills in the token ids the device sampled, and records recent tokens."""

from __future__ import annotations

from contract.arrays import Ints
from contract.records import LAST_TOKEN, QUERY_TOKEN, RECENT_TOKEN, SLOT


def load_request_state(*, query: Ints, slot_table: Ints, recent: Ints) -> Ints:
    """``query`` [tokens, 4] (QUERY_TOKEN) with every LAST_TOKEN replaced by its slot's last token.

    ``slot_table`` is [slots, 8] (SLOT). A last token of -1 (the logits were not finite) is replaced
    by token 0: that sequence has ended and its results are dropped. A RECENT_TOKEN is replaced with
    the entry of ``recent`` at its position. Then all tokens are stored in ``recent`` [slots, n]:
    that of position p in entry p mod n of its slot."""
    resolved, before = query.copy(), recent.copy()
    records = resolved.view(QUERY_TOKEN)[:, 0]
    last = slot_table.view(SLOT)["last_token"][:, 0]
    for record in records:
        index = record["slot"], record["position"] % recent.shape[1]
        if record["token"] == LAST_TOKEN:
            record["token"] = max(last[record["slot"]], 0)
        elif record["token"] == RECENT_TOKEN:
            record["token"] = before[index]
        recent[index] = record["token"]
    return resolved
