"""Drafts of the next round, submitted before the host has taken the tokens of the round in front.
The device would wait meanwhile. No draft depends on it: tokens that turn out different are drafted
again."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
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
    """A sequence for which the step in flight verifies ``drafted`` drafts, and which has its slot
    since ``admission``. At most ``drafts`` will be drafted behind it."""

    sequence: Sequence
    admission: int
    drafted: int
    drafts: int


class NextRound:
    """Submits to ``block`` the drafts behind a step that verifies drafts of every sequence that
    runs. ``ends`` are the tokens that end one."""

    def __init__(self, block: DraftBlock, info: TierInfo, ends: Collection[int]) -> None:
        self._block, self._ends = block, ends
        self._steps_ahead, self._early = draft_steps_ahead(info), drafts_early(info)
        self._verified: list[_Verified] = []

    @property
    def expected(self) -> bool:
        """Whether drafts may follow the step in flight."""
        return bool(self._verified)

    def interrupt(self) -> None:
        """Continue behind a step in which a sequence has no drafts."""
        self._verified = []

    def after_step(self, sequences: Items[Sequence], drafted: list[int], drafts: list[int]) -> None:
        """Note the step that verifies ``drafted`` drafts of each sequence, behind which at most
        ``drafts`` are drafted. The first steps of a single sequence's round are submitted at once,
        as if all were accepted; of several that is seldom so."""
        verified = [
            _Verified(sequence, sequence.admission, *counts)
            for sequence, *counts in zip(sequences, drafted, drafts, strict=True)
        ]
        # Steps ahead add tokens to the recent ones that penalties must not see.
        alone = verified[0].sequence if len(verified) == 1 else None
        if alone is not None and self._steps_ahead and not alone.request.sampling.penalizes:
            tokens = alone.tokens[: alone.known], placeholders(drafted[0] + 1)
            self._begin(verified, [np.concatenate(tokens)], self._steps_ahead)
        self._verified = verified if self._early else []

    def expect(self, sequence: Sequence, drafts: int) -> None:
        """Change the number of drafts of a sequence behind the step in flight."""
        self._verified = [
            one._replace(drafts=drafts) if one.sequence is sequence else one
            for one in self._verified
        ]

    def after_result(
        self, sequences: Items[Sequence], admissions: Items[int], output: StepOutput
    ) -> list[int]:
        """Submit the drafts behind the step of ``sequences``, computed under ``admissions``, that
        was just read. If one ends or does not draft again, nothing of their steps is read. Returns
        how many tokens each will have, written behind the known ones; none if nothing was
        submitted."""
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
        tokens = [one.sequence.tokens[:end] for one, end in zip(verified, known, strict=True)]
        most = max(one.drafts for one in verified)
        return known if self._begin(verified, tokens, most) else []

    def _begin(self, verified: list[_Verified], tokens: list[Tokens], steps: int) -> bool:
        """Submit at most ``steps`` steps of a round that begins with these ``tokens``; whether
        there is room for drafts of each sequence."""
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
        self._block.begin_ahead(round_, steps)
        return True
