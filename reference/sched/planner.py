"""Which tokens the next step computes: a pure function of the sequences and the limits.

Decode tokens come first and are never delayed by prefill; prefill fills what is left of the
step's token budget, oldest sequence first. The order of a step's tokens changes no bit of any
sequence, so this is policy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PENDING = np.dtype([("slot", "<i4"), ("computed", "<i4"), ("length", "<i4"), ("draft", "<i4")])
"""A sequence holding a slot: ``length`` tokens can be computed, the first ``computed`` are. Where
the last ``draft`` of them are guesses and all but one before them are computed, it decodes."""

CHUNK = np.dtype([("slot", "<i4"), ("start", "<i4"), ("count", "<i4")])
"""Compute positions ``start .. start + count - 1`` of a slot in this step."""


def plan_step(pending: NDArray[np.void], chunk_tokens: int) -> NDArray[np.void]:
    """The CHUNK[n] of one step. ``chunk_tokens`` caps the prefill tokens of a step.

    ``pending`` is PENDING[n] in order of age. Every sequence that decodes, with one token left and
    its guesses, is in the step; no step is empty while work is pending.
    """
    if chunk_tokens < 1:
        raise ValueError("a step computes at least one token")
    remaining = pending["length"] - pending["computed"]
    decodes = remaining == pending["draft"] + 1
    decode, prefill = decodes.nonzero()[0], (~decodes & (remaining > 0)).nonzero()[0]
    wanted = remaining[prefill]
    given = np.minimum(wanted, chunk_tokens - (wanted.cumsum() - wanted))
    prefill, given = prefill[given > 0], given[given > 0]
    order = np.concatenate([decode, prefill])
    chunks = np.empty(len(order), CHUNK)
    chunks["slot"], chunks["start"] = pending["slot"][order], pending["computed"][order]
    chunks["count"] = np.concatenate([remaining[decode], given])
    return chunks
