"""STREAM_OUT: append the step's tokens to the output ring."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.records import OUTPUT_EVENT


def stream_out(
    *,
    token: NDArray[np.int32],
    output_rows: NDArray[np.int32],
    query: NDArray[np.int32],
    ring: NDArray[np.int32],
) -> None:
    """Append one OUTPUT_EVENT per row to ``ring`` ([ring_events, 8] words), in place.

    Entry 0 is the ring's header: its sequence word counts the events ever written, and event
    number n lies in entry 1 + n mod (ring_events - 1). The position is the sampled token's.
    """
    events = ring.view(OUTPUT_EVENT)[:, 0]
    written = int(events[0]["sequence"])
    for row, query_row in enumerate(output_rows):
        number = (written + row) & 0xFFFFFFFF
        event = events[1 + number % (len(events) - 1)]
        event["sequence"] = number
        event["token"] = token[row]
        event["slot"] = query[query_row, 1]
        event["position"] = query[query_row, 2] + 1
    events[0]["sequence"] = (written + len(output_rows)) & 0xFFFFFFFF
