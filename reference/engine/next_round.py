"""Drafts of the next round, submitted before the host has taken the tokens of the round in front.
The device would wait meanwhile. No draft depends on it: tokens that turn out different are drafted
again."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from contract.draft_shift import ShiftsInputs
from contract.records import EVENT_NUMBERS
from contract.tier import Tier, TierInfo
from reference.draft_shifts import Verification
from reference.engine.draft_block import DraftBlock, placeholders
from reference.engine.drafter import DraftRequest, Tokens
from reference.engine.sequence import Sequence
from reference.runner import StepOutput, Submission

ALL = 1 << 30
"""More steps than any draft has."""


def draft_steps_ahead(tier: Tier) -> int:
    """The number of steps of a draft block that the device computes while the host reads which
    drafts were accepted: all if it knows itself, else the first ones as if all were. It is 0 if the
    device computes in the host's memory."""
    if isinstance(tier, ShiftsInputs):
        return ALL
    return 2 if tier.info.asynchronous and not tier.info.host_unified else 0


def drafts_early(info: TierInfo) -> bool:
    """Whether the host submits drafts before it takes the tokens in front of them: the device
    computes meanwhile."""
    return info.asynchronous


class _Verified(NamedTuple):
    """A sequence for which the step in flight verifies ``drafted`` drafts, and which has its slot
    since ``admission``. At most ``drafts`` will be drafted behind it."""

    sequence: Sequence
    admission: int
    drafted: int
    drafts: int


class NextRound:
    """Submits to ``block`` the drafts behind a step that verifies drafts of every sequence that
    runs. ``ends`` are the tokens that end one."""

    def __init__(self, block: DraftBlock, tier: Tier, ends: Collection[int]) -> None:
        self._block, self._ends = block, ends
        self._steps_ahead, self._early = draft_steps_ahead(tier), drafts_early(tier.info)
        self._verified: list[_Verified] = []
        if isinstance(tier, ShiftsInputs):
            tier.prepare_shifts()

    @property
    def expected(self) -> bool:
        """Whether drafts may follow the step in flight."""
        return bool(self._verified)

    def interrupt(self) -> None:
        """Continue behind a step in which a sequence has no drafts."""
        self._verified = []

    def after_step(
        self, step: Submission, sequences: Items[Sequence], drafted: list[int], drafts: list[int]
    ) -> None:
        """Note the ``step`` that verifies ``drafted`` drafts of each sequence, behind which at most
        ``drafts`` are drafted. Steps of the next round are submitted at once: all, behind those
        that are accepted; or the first ones of a single sequence, as if all were, which of several
        is seldom so."""
        verified = [
            _Verified(sequence, sequence.admission, *counts)
            for sequence, *counts in zip(sequences, drafted, drafts, strict=True)
        ]
        behind_any = self._steps_ahead == ALL
        # Steps ahead add tokens to the recent ones that penalties must not see.
        penalized = any(one.request.sampling.penalizes for one in sequences)
        if self._steps_ahead and (behind_any or len(verified) == 1) and not penalized:
            tokens = [
                np.concatenate((one.tokens[: one.known], placeholders(count + 1)))
                for one, count in zip(sequences, drafted, strict=True)
            ]
            behind = _verification(step, drafted) if behind_any else None
            self._begin(verified, tokens, self._steps_ahead, behind)
        self._verified = verified if self._early else []

    def expect(self, sequence: Sequence, drafts: int) -> None:
        """Change the number of drafts of a sequence behind the step in flight."""
        self._verified = [
            one._replace(drafts=drafts) if one.sequence is sequence else one
            for one in self._verified
        ]

    def after_result(
        self, sequences: Items[Sequence], admissions: Items[int], output: StepOutput, follows: bool
    ) -> list[int]:
        """Submit the drafts behind the step of ``sequences``, computed under ``admissions``, that
        was just read. If one ends or does not draft again, nothing of their steps is read. Returns
        how many tokens each will have, written behind the known ones; none if nothing was
        submitted. If the step that verifies them ``follows`` at once, what was not submitted behind
        the step in front is left to that."""
        verified, self._verified = self._verified, []
        read = list(zip(sequences, admissions, strict=True))
        if not verified or [one[:2] for one in verified] != read:
            return []
        known, row = [], 0
        for one in verified:
            sequence = one.sequence
            if not sequence.running or one.admission != sequence.admission:
                return []
            taken = output.token[row : row + int(output.accepted[row]) + 1]
            ends = () if sequence.request.ignore_end else self._ends
            if any(token < 0 or token in ends for token in taken.tolist()):
                return []
            known.append(sequence.known + len(taken))
            # Nothing else reads what lies behind the known tokens.
            sequence.tokens[sequence.known : known[-1]] = taken
            row += one.drafted + 1
        if follows and self._steps_ahead == ALL:
            room = [
                one.sequence.last_position - end for one, end in zip(verified, known, strict=True)
            ]
            return known if min(map(min, room, [one.drafts for one in verified])) > 0 else []
        tokens = [one.sequence.tokens[:end] for one, end in zip(verified, known, strict=True)]
        most = max(one.drafts for one in verified)
        return known if self._begin(verified, tokens, most) else []

    def _begin(
        self,
        verified: list[_Verified],
        tokens: list[Tokens],
        steps: int,
        behind: Verification | None = None,
    ) -> bool:
        """Submit at most ``steps`` steps of a round that begins with these ``tokens``, or with
        those of them that ``behind`` accepts; whether there is room for drafts of each sequence."""
        round_ = [
            DraftRequest(
                one.sequence.order,
                one.sequence.slot,
                its,
                min(one.drafts, one.sequence.last_position - len(its)),
            )
            for one, its in zip(verified, tokens, strict=True)
        ]
        if any(one.limit <= 0 for one in round_):
            return False
        self._block.begin_ahead(round_, steps, behind)
        return True


def _verification(step: Submission, drafted: Items[int]) -> Verification:
    """The step that verifies so many drafts of each sequence, which have a row each behind that of
    the known token."""
    begins = accumulate((count + 1 for count in drafted), initial=step.first_event)
    drafts = [(begin % EVENT_NUMBERS, count) for begin, count in zip(begins, drafted, strict=False)]
    return Verification(step.fence, step.ring, drafts)
