"""STORE_REQUEST_STATE: stores each sampled token as the last token of its slot."""

from __future__ import annotations

from contract.arrays import Ints
from contract.records import QUERY_TOKEN, SLOT


def store_request_state(*, token: Ints, output_rows: Ints, query: Ints, slot_table: Ints) -> None:
    """Store ``token`` [rows] and its position in ``slot_table`` [slots, 8] (SLOT), in place.

    ``output_rows`` [rows] holds the index in ``query`` [tokens, 4] (QUERY_TOKEN) of each row; of
    several rows of a slot the last one counts."""
    queries, slots = query.view(QUERY_TOKEN)[:, 0], slot_table.view(SLOT)[:, 0]
    for sampled, row in zip(token, output_rows, strict=True):
        slot = slots[queries[row]["slot"]]
        slot["last_token"] = sampled
        slot["position"] = queries[row]["position"] + 1
