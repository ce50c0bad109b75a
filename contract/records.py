"""Memory layouts a device reads or writes: numpy structured dtypes of 32-bit little-endian words.

Every record is a whole number of words, so that a kernel can address it as an int32 array: the
``I32`` operands of the opcode table with a literal last dimension are arrays of these records.
"""

from __future__ import annotations

import numpy as np

NO_SLOT = 0xFFFFFFFF
"""Owner of a page that no slot owns."""

STEP = np.dtype([("tokens", "<i4"), ("rows", "<i4"), ("first_event", "<u4"), ("reserved", "<u4")])
"""First record of a step's inputs: how many query tokens and output rows it has, and the number of
the first event it writes to the output ring."""

QUERY_TOKEN = np.dtype([("token", "<i4"), ("slot", "<i4"), ("position", "<i4"), ("flags", "<i4")])
"""One query token of a step: which token of which slot at which position. Token LAST_TOKEN is the
one the slot's step before sampled. The tokens of a slot are in order of position."""

LAST_TOKEN = -1
"""A query token that the device knows and the host need not."""

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
"""How one output row is sampled (rule R9). ``position`` is the position being sampled. The
penalties look at the ``repeat_last_n`` tokens before it, 0 when there are none: the token of
``slot`` at position p lies in entry p mod n of the n recent tokens kept of every slot. ``mask`` k
allows the tokens of row k - 1 of ``allowed``, 0 all of them; ``bias_count`` rows of ``bias`` from
``bias_first`` on are the row's LOGIT_BIAS records. Neither counts if SAMPLE lacks the operand."""

LOGIT_BIAS = np.dtype([("token", "<i4"), ("bias", "<f4")])
"""What is added to the logit of one token before anything but the mask (rule R9): finite. The
tokens of one row's biases are distinct ids of the vocabulary."""

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
"""One row of the slot table: what the device keeps of a sequence. Steps use ``last_token``, the
newest token sampled, and ``position``, where it goes."""

PAGE_META = np.dtype(
    [("ref_count", "<u4"), ("owner_slot", "<u4"), ("tenant", "<u4"), ("token_count", "<u4")]
)
"""One KV page. Written by the host; a device reads ``token_count`` only."""

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
"""One event of the output ring. ``sequence`` is its number; event n lies in entry n mod size."""
