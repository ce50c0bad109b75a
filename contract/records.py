"""Memory layouts a device reads or writes: numpy structured dtypes of 32-bit little-endian words.

Every record is a whole number of words, so that a kernel can address it as an int32 array: the
``I32`` operands of the opcode table with a literal last dimension are arrays of these records."""

from __future__ import annotations

import numpy as np


def record(fields: str) -> np.dtype[np.void]:
    """The dtype of a record without padding. ``fields`` such as ``u4 slot page, f4 scale[2]`` are a
    little-endian type of numpy and the fields of this type, with the length of an array."""
    found = []
    for group in fields.split(", "):
        kind, *names = group.split()
        for name in names:
            name, _, length = name.rstrip("]").partition("[")
            found.append((name, f"<{kind}", (int(length),) if length else ()))
    return np.dtype(found)


NO_SLOT = 0xFFFFFFFF
"""The owner of a page that belongs to no slot."""

STEP = record("i4 tokens rows, u4 first_event reserved")
"""The first record of a step's inputs: its numbers of query tokens and output rows, and the number
of the first event it writes to the output ring."""

QUERY_TOKEN = record("i4 token slot position flags")
"""One query token of a step: a token of a slot at a position. Token LAST_TOKEN stands for the token
that the slot's previous step sampled, RECENT_TOKEN for a drafted token. A slot's tokens are in
order of position."""

LAST_TOKEN = -1
"""Stands for a token the device has sampled and the host may not have read yet."""

RECENT_TOKEN = -2
"""Stands for a drafted token that the host may not have read yet: the device finds it in the slot's
recent tokens, in the entry of the same position. No other token of the step has this entry."""

SAMPLING = record(
    "f4 temperature top_p min_p repeat_penalty, i4 top_k, u4 seed_low seed_high, i4 position, "
    "f4 presence_penalty frequency_penalty, "
    "i4 repeat_last_n slot mask bias_first bias_count reserved"
)
"""The sampling parameters of one output row (rule R9).

``position`` is the position to be sampled. The penalties look at the ``repeat_last_n`` tokens
before it, 0 for none: the device keeps the n most recent tokens of every slot, the token at
position p in entry p mod n. ``mask`` k > 0 allows the tokens of row k - 1 of ``allowed``; 0 allows
every token. The row's LOGIT_BIAS records are ``bias_count`` rows of ``bias`` from ``bias_first``
on. Masks and biases are ignored if the SAMPLE node lacks their operand."""

LOGIT_BIAS = record("i4 token, f4 bias")
"""A finite number added to the logit of one token, before penalties and temperature (rule R9). A
row's biases have distinct token ids."""

SLOT = record(
    "u4 request_low request_high tenant state, i4 position last_token first_page page_count"
)
"""One row of the slot table: what the device stores for a sequence. Steps use ``last_token``, the
newest sampled token, and ``position``, the position it belongs to."""

PAGE_META = record("u4 ref_count owner_slot tenant token_count")
"""Metadata of one KV page. The host writes it; a device reads only ``token_count``."""

EVENT_NUMBERS = 1 << 32
"""Events of a ring are numbered modulo this."""

OUTPUT_EVENT = record(
    "u4 sequence, i4 slot, u4 tenant, i4 token position, u4 flags, f4 log_probability, u4 reserved"
)
"""One event of the output ring. ``sequence`` is its number; event n lies in entry n mod size.
Where a graph verifies drafts, ``flags`` is how many drafted tokens after the row's are right."""
