"""What requests ask of their tokens: masks on the way into a step, log-probabilities out of it.

A mask depends on the token before it. So a sequence with one runs in lockstep: its next token is
planned when the host has read its last one, however many steps of others are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from contract.types import Request
from reference.engine.sequence import RunningSequence
from reference.engine.sequence import Sequence as RunningRequest
from reference.runner import StepInput, StepOutput
from reference.sched.constraints import Mask
from reference.sched.planner import Chunk

Listed = tuple[float | None, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and of the likeliest ones in its place."""
NOT_LISTED: Listed = (None, ())


def with_masks(
    inputs: StepInput,
    actives: Sequence[RunningSequence],
    chunks: Sequence[Chunk],
    rows: Sequence[int],
    words: int,
) -> StepInput:
    """``inputs`` with the masks, of ``words`` each, of those sequences that have some and get a
    token in this step; ``rows`` are the rows of each chunk."""
    if not any(active.masked for active in actives):
        return inputs
    masks: list[Mask] = []
    end = 0
    for active, (_, start, count), requested in zip(actives, chunks, rows, strict=True):
        end += requested
        sequence = active.sequence
        last = start + count >= sequence.known and sequence.samples
        if not active.masked or not requested or not last:
            continue
        mask = _mask_of(sequence, words)
        if mask is not None:
            masks.append(mask)
            inputs.sampling["mask"][end - 1] = len(masks)
    return replace(inputs, allowed=np.array(masks)) if masks else inputs


def _mask_of(sequence: RunningRequest, words: int) -> Mask | None:
    """What the sequence's provider allows next. One that fails allows nothing, which ends its
    sequence with an error and no other."""
    assert sequence.allowed is not None
    generated = sequence.tokens[len(sequence.request.prompt) : sequence.known].tolist()
    try:
        mask = sequence.allowed(generated)
        if mask is None:
            return None
        if mask.dtype != np.uint32 or mask.shape != (words,):
            raise ValueError(f"a mask is {mask.dtype}{list(mask.shape)}, not uint32[{words}]")
        return mask
    except Exception:
        # Loading it is a hundredth of a start, in which nothing is logged.
        import logging

        logging.getLogger(__name__).exception(
            "request %d: its masks failed; it ends", sequence.request.id
        )
        return np.zeros(words, np.uint32)


def listed_of(request: Request, output: StepOutput, row: int) -> Listed:
    """What ``request`` wants listed of a row of a step."""
    count = request.log_probabilities
    if count is None:
        return NOT_LISTED
    ids = output.top_ids[row, :count].tolist()
    logs = output.top_log_probabilities[row, :count].tolist()
    return float(output.log_probability[row]), tuple(zip(ids, logs, strict=True))
