"""A step with drafts, and what the policy is told about it."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass
from reference.sched.draft_history import DraftHistory
from reference.sched.drafts import DraftPolicy


@dataclass(slots=True)
class DraftRound:
    """A step with drafts, begun at ``began`` seconds: ``drafting`` of ``running`` sequences have at
    most ``drafted`` drafts. ``first``: for some of them it is the first round since a plain step,
    before which the drafter reads ``read`` tokens. ``noted``: the policy has its time."""

    began: float
    running: int
    drafting: int
    drafted: int
    first: bool
    read: int
    noted: bool = False

    def note(
        self, policy: DraftPolicy, history: DraftHistory, now: float, gained: int, drafted: int
    ) -> None:
        """Record the round of a sequence, read ``now``: ``drafted`` drafts gave ``gained``
        tokens."""
        history.note(gained, drafted + history.forbidden, self.drafting)
        history.forbidden = False
        if not self.noted:
            self.noted = True
            policy.note_round(
                self.drafted,
                self.drafting,
                self.running,
                now - self.began,
                first=self.first,
                read=self.read,
            )
        policy.note_gain(history, gained, self.running)
