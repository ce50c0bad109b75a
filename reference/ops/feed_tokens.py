"""FEED_TOKENS: the sampled tokens become the queries of the next step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.records import QUERY_TOKEN, SAMPLING


def feed_tokens(
    *,
    token: NDArray[np.int32],
    output_rows: NDArray[np.int32],
    query: NDArray[np.int32],
    sampling: NDArray[np.int32],
    recent: NDArray[np.int32],
) -> None:
    """Move every row on by one position, in place.

    ``token`` and ``output_rows`` are [rows], ``query`` [tokens, 4] (QUERY_TOKEN), ``sampling``
    [rows, 16] (SAMPLING), ``recent`` [rows, n]. A row without a token (-1) goes on with token 0:
    its sequence has ended in an error, and nobody looks at what follows.
    """
    queries, records = query.view(QUERY_TOKEN)[:, 0], sampling.view(SAMPLING)[:, 0]
    for row, query_row in enumerate(output_rows):
        record = records[row]
        if token[row] >= 0 and record["repeat_last_n"] > 0:
            recent[row, record["position"] % record["repeat_last_n"]] = token[row]
        record["position"] += 1
        queries[query_row]["token"] = max(token[row], 0)
        queries[query_row]["position"] += 1
