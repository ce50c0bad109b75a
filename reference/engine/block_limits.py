"""The sizes of a draft block's runner, and what the model of the block has for it."""

from __future__ import annotations

from dataclasses import replace

from reference.limits import RING_STEPS, Limits, with_drafts

MIN_RING = 128
"""Fewest positions of a slot whose hidden states stay on the device. A sequence without drafts is
read by the block once per ring."""


def drafting_limits(limits: Limits, drafts: int) -> Limits:
    """``limits`` with room for the hidden states of a block that drafts at most ``drafts`` tokens
    of a sequence at a time. The block records recent tokens late, by at most the ring and the steps
    in flight, so twice as many are kept."""
    rows = 2 * (drafts + 1 + RING_STEPS)
    ring = max(MIN_RING, 1 << (rows - 1).bit_length())
    recent = max(limits.recent_tokens, 2 * ring)
    return replace(with_drafts(limits, drafts), hidden_rows=ring, recent_tokens=recent)


def block_limits(target: Limits) -> Limits:
    """The limits of the block's runner for a model with the limits ``target``: the same pages,
    slots, recent tokens and hidden states, and a row for every slot."""
    return replace(
        target,
        step_rows=target.slots,
        saved_states=0,
        draft_tokens=0,
        masks=0,
        biases=0,
        top_log_probabilities=0,
        hidden_states=False,
        scores=False,
    )
