"""STREAM_OUT: writes the step's tokens as events to the output ring."""

from __future__ import annotations

from contract.arrays import Ints
from contract.records import OUTPUT_EVENT, QUERY_TOKEN, STEP


def stream_out(*, token: Ints, output_rows: Ints, query: Ints, step: Ints, ring: Ints) -> None:
    """Write one OUTPUT_EVENT per row to ``ring`` ([ring_events, 8] words), in place.

    ``step`` is the STEP record, which numbers the events; event n lies in entry n mod ring_events.
    The event's position is that of the sampled token."""
    events, queries = ring.view(OUTPUT_EVENT)[:, 0], query.view(QUERY_TOKEN)[:, 0]
    first = int(step.view(STEP)[0, 0]["first_event"])
    for row, query_row in enumerate(output_rows):
        number = (first + row) & 0xFFFFFFFF
        event = events[number % len(events)]
        event["sequence"] = number
        event["token"] = token[row]
        event["slot"] = queries[query_row]["slot"]
        event["position"] = queries[query_row]["position"] + 1
