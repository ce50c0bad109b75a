"""Drafts of a sequence's next round, submitted before the host has taken the tokens of the round in
front. The device would wait meanwhile. No draft depends on it: tokens that turn out different are
drafted again."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from contract.tier import TierInfo
from reference.engine.draft_block import DraftBlock, placeholders
from reference.engine.drafter import DraftRequest, Tokens
from reference.engine.sequence import Sequence
from reference.runner import StepOutput


def draft_steps_ahead(info: TierInfo) -> int:
    """The number of steps of a draft block that the device computes while the host reads which
    drafts were accepted. It is 0 if the device computes in the host's memory."""
    return 2 if info.asynchronous and not info.host_unified else 0


def drafts_early(info: TierInfo) -> bool:
    """Whether the host submits drafts before it takes the tokens in front of them: the device
    computes meanwhile."""
    return info.asynchronous


class _Verified(NamedTuple):
    """The step in flight verifies drafts of ``sequence``, which has its slot since ``admission``.
    At most ``drafts`` will be drafted behind it."""

    sequence: Sequence
    admission: int
    drafts: int


class NextRound:
    """Submits to ``block`` the drafts behind a step that verifies those of a single sequence.
    ``ends`` are the tokens that end one."""

    def __init__(self, block: DraftBlock, info: TierInfo, ends: Collection[int]) -> None:
        self._block, self._ends = block, ends
        self._steps_ahead, self._early = draft_steps_ahead(info), drafts_early(info)
        self._verified: _Verified | None = None

    def interrupt(self) -> None:
        """Continue behind a step that verifies no drafts, or those of several sequences."""
        self._verified = None

    def after_step(self, sequence: Sequence, drafted: int, drafts: int) -> None:
        """Submit the first steps of a round of at most ``drafts`` drafts right behind the step that
        verifies ``drafted``, as if all were accepted."""
        verified = _Verified(sequence, sequence.admission, drafts)
        # Steps ahead add tokens to the recent ones that penalties must not see.
        if self._steps_ahead and not sequence.request.sampling.penalizes:
            tokens = sequence.tokens[: sequence.known], placeholders(drafted + 1)
            self._begin(verified, np.concatenate(tokens), self._steps_ahead)
        self._verified = verified if self._early else None

    def expect(self, drafts: int) -> None:
        """Change the number of drafts behind the step in flight."""
        if self._verified is not None:
            self._verified = self._verified._replace(drafts=drafts)

    def after_result(self, sequence: Sequence, admission: int, output: StepOutput) -> int:
        """Submit the drafts behind the step of ``sequence``, computed under ``admission``, that was
        just read. If it ends or does not draft again, nothing of their steps is read. Returns how
        many tokens it will have, written behind the known ones; 0 if nothing was submitted."""
        verified, self._verified = self._verified, None
        if verified is None or verified[:2] != (sequence, admission):
            return 0
        if not sequence.running or admission != sequence.admission:
            return 0
        accepted = int(output.accepted[0])
        taken = output.token[: accepted + 1]
        ends = () if sequence.request.ignore_end else self._ends
        if any(token < 0 or token in ends for token in taken.tolist()):
            return 0
        known = sequence.known + accepted + 1
        # Nothing else reads what lies behind the known tokens.
        sequence.tokens[sequence.known : known] = taken
        return known if self._begin(verified, sequence.tokens[:known], verified.drafts) else 0

    def _begin(self, verified: _Verified, tokens: Tokens, steps: int) -> bool:
        """Submit at most ``steps`` steps of a round that begins with these ``tokens``; whether
        there is room for drafts."""
        sequence = verified.sequence
        limit = min(verified.drafts, sequence.last_position - len(tokens))
        if limit > 0:
            one = DraftRequest(sequence.order, sequence.slot, tokens, limit)
            self._block.begin_ahead(one, steps)
        return limit > 0
