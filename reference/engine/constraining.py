"""Token masks among the inputs of a step, and log-probabilities among its outputs.

A mask depends on the token before it. So a sequence with masks runs in lockstep: its next token is
planned once the host has read its last one, however many steps of other sequences are in flight. If
tokens are drafted for it, each row has the mask for the drafted tokens before it."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from contract.arrays import Ints
from contract.errors import ZincError
from contract.lazy_dataclass import dataclass
from contract.types import Request
from reference.engine.options import EngineOptions
from reference.engine.sequence import MaskProvider, Sequence
from reference.runner import ModelRunner, StepInput, StepOutput
from reference.sched.constraints import Mask, is_allowed, pack_mask
from reference.sched.planner import Chunk

LogProbabilities = tuple[float | None, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and (token, log-probability) of the likeliest tokens."""
NO_LOG_PROBABILITIES: LogProbabilities = (None, ())


@dataclass(frozen=True, slots=True)
class MinTokensMasks:
    """Masks for an answer of at least ``count`` tokens. Until then ``before`` is combined with
    ``own``, the answer's own masks, unless the two together allow no token."""

    count: int
    before: Mask
    own: MaskProvider | None

    def __call__(self, generated: list[int]) -> Mask | None:
        own = None if self.own is None else self.own(generated)
        if len(generated) >= self.count:
            return own
        if own is None or own.shape != self.before.shape:
            return self.before if own is None else own
        both = own & self.before
        return both if both.any() else own


def masks_with_min_tokens(
    request: Request, own: MaskProvider | None, options: EngineOptions, runner: ModelRunner
) -> MaskProvider | None:
    """The ``own`` masks of a request, combined with a mask that enforces ``min_tokens``."""
    if not request.min_tokens:
        return own
    vocab = runner.model.config.vocab
    ends = () if request.ignore_end else options.end_of_generation
    forbidden = [token for token in {*request.stop_tokens, *ends} if 0 <= token < vocab]
    return MinTokensMasks(request.min_tokens, ~pack_mask(forbidden, vocab), own)


def drop_min_tokens(sequence: Sequence) -> None:
    """Restore a sequence's own masks once it has its least number of tokens."""
    masks, generated = sequence.allowed, sequence.known - len(sequence.request.prompt)
    if isinstance(masks, MinTokensMasks) and generated >= masks.count:
        sequence.allowed = masks.own


def with_masks(
    inputs: StepInput,
    sequences: Items[Sequence],
    chunks: Items[Chunk],
    rows: Items[int],
    words: int,
) -> StepInput:
    """``inputs`` with masks of ``words`` 32-bit words: one for each masked sequence that gets a
    token in this step, and one for each of its drafted tokens. ``rows`` are the numbers of output
    rows of the chunks."""
    if not any(sequence.masked for sequence in sequences):
        return inputs
    masks: list[Mask] = []
    end = 0
    for sequence, (_, start, count), requested in zip(sequences, chunks, rows, strict=True):
        end += requested
        last = start + count >= sequence.known and sequence.samples
        if not sequence.masked or not requested or not last:
            continue
        drafted = sequence.drafted(start, requested)
        own = sequence.draft_masks if drafted else [_mask_of(sequence, words)]
        for row, mask in enumerate(own, end - len(own)):
            if mask is not None:
                masks.append(mask)
                inputs.sampling["mask"][row] = len(masks)
    return replace(inputs, allowed=np.array(masks)) if masks else inputs


def allowed_draft(sequence: Sequence, draft: Ints, ends: Collection[int], words: int) -> Ints:
    """The drafted tokens before the first one that the masks forbid or that ends the answer. Stores
    the masks of their rows in the sequence."""
    masks = [_mask_of(sequence, words)]
    drafted: list[int] = []
    for token in draft.tolist():
        if token in ends or not is_allowed(masks[-1], token):
            break
        try:
            masks.append(_checked_mask(sequence, [*drafted, token], words))
        except Exception:
            # If the sequence gets the token, the provider is called again, and may fail then.
            break
        drafted.append(token)
    sequence.draft_masks = masks
    return draft[: len(drafted)]


def _checked_mask(sequence: Sequence, drafted: Items[int], words: int) -> Mask | None:
    """The mask for the token after those of a sequence and the ``drafted`` ones. Raises what the
    provider raises, and ValueError for an array of the wrong shape or dtype."""
    assert sequence.allowed is not None
    generated = sequence.tokens[len(sequence.request.prompt) : sequence.known].tolist()
    mask = sequence.allowed([*generated, *drafted])
    if mask is not None and (mask.dtype != np.uint32 or mask.shape != (words,)):
        raise ValueError(f"a mask is {mask.dtype}{list(mask.shape)}, not uint32[{words}]")
    return mask


def _mask_of(sequence: Sequence, words: int) -> Mask | None:
    """The mask of the sequence's next token. If the provider fails, the mask allows nothing, which
    ends this sequence with an error and no other."""
    try:
        return _checked_mask(sequence, (), words)
    except Exception as error:
        # Importing logging takes 1 % of the start of a process that logs nothing.
        import logging

        logging.getLogger(__name__).error(
            "request %d: its masks failed; it ends: %s",
            sequence.request.id,
            error,
            # A request that asks for too much is not a fault of this program.
            exc_info=not isinstance(error, ZincError),
        )
        return np.zeros(words, np.uint32)


def log_probabilities_of(request: Request, output: StepOutput, row: int) -> LogProbabilities:
    """The log-probabilities that ``request`` asked for, from one output row of a step."""
    count = request.log_probabilities
    if count is None:
        return NO_LOG_PROBABILITIES
    ids = output.top_ids[row, :count].tolist()
    logs = output.top_log_probabilities[row, :count].tolist()
    return float(output.log_probability[row]), tuple(zip(ids, logs, strict=True))
