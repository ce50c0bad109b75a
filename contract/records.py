"""Memory layouts a device reads or writes: numpy structured dtypes of 32-bit little-endian words.

Every record is a whole number of words, so that a kernel can address it as an int32 array: the
``I32`` operands of the opcode table with a literal last dimension are arrays of these records."""

from __future__ import annotations

import numpy as np

NO_SLOT = 0xFFFFFFFF
"""The owner of a page that belongs to no slot."""

STEP = np.dtype([("tokens", "<i4"), ("rows", "<i4"), ("first_event", "<u4"), ("reserved", "<u4")])
"""The first record of a step's inputs: its numbers of query tokens and output rows, and the number
of the first event it writes to the output ring."""

QUERY_TOKEN = np.dtype([("token", "<i4"), ("slot", "<i4"), ("position", "<i4"), ("flags", "<i4")])
"""One query token of a step: a token of a slot at a position. Token LAST_TOKEN stands for the token
that the slot's previous step sampled, RECENT_TOKEN for a drafted token. A slot's tokens are in
order of position."""

LAST_TOKEN = -1
"""Stands for a token the device has sampled and the host may not have read yet."""

RECENT_TOKEN = -2
"""Stands for a drafted token that the host may not have read yet: the device finds it in the slot's
recent tokens, in the entry of the same position. No other token of the step has this entry."""

SAMPLING = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repeat_penalty", "<f4"),
        ("top_k", "<i4"),
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("position", "<i4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("repeat_last_n", "<i4"),
        ("slot", "<i4"),
        ("mask", "<i4"),
        ("bias_first", "<i4"),
        ("bias_count", "<i4"),
        ("reserved", "<i4"),
    ]
)
"""The sampling parameters of one output row (rule R9).

``position`` is the position to be sampled. The penalties look at the ``repeat_last_n`` tokens
before it, 0 for none: the device keeps the n most recent tokens of every slot, the token at
position p in entry p mod n. ``mask`` k > 0 allows the tokens of row k - 1 of ``allowed``; 0 allows
every token. The row's LOGIT_BIAS records are ``bias_count`` rows of ``bias`` from ``bias_first``
on. Masks and biases are ignored if the SAMPLE node lacks their operand."""

LOGIT_BIAS = np.dtype([("token", "<i4"), ("bias", "<f4")])
"""A finite number added to the logit of one token, before penalties and temperature (rule R9). A
row's biases have distinct token ids."""

SLOT = np.dtype(
    [
        ("request_low", "<u4"),
        ("request_high", "<u4"),
        ("tenant", "<u4"),
        ("state", "<u4"),
        ("position", "<i4"),
        ("last_token", "<i4"),
        ("first_page", "<i4"),
        ("page_count", "<i4"),
    ]
)
"""One row of the slot table: what the device stores for a sequence. Steps use ``last_token``, the
newest sampled token, and ``position``, the position it belongs to."""

PAGE_META = np.dtype(
    [("ref_count", "<u4"), ("owner_slot", "<u4"), ("tenant", "<u4"), ("token_count", "<u4")]
)
"""Metadata of one KV page. The host writes it; a device reads only ``token_count``."""

OUTPUT_EVENT = np.dtype(
    [
        ("sequence", "<u4"),
        ("slot", "<i4"),
        ("tenant", "<u4"),
        ("token", "<i4"),
        ("position", "<i4"),
        ("flags", "<u4"),
        ("log_probability", "<f4"),
        ("reserved", "<u4"),
    ]
)
"""One event of the output ring. ``sequence`` is its number; event n lies in entry n mod size.
Where a graph verifies drafts, ``flags`` is how many drafted tokens after the row's are right."""
