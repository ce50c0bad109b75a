"""How many of the tokens drafted for a sequence and for a tenant were right."""

from __future__ import annotations

from dataclasses import field

from contract.lazy_dataclass import dataclass

DECAY = 0.97
"""Weight of earlier drafts after each round in the part of drafts that are right."""
COMMON_TRIALS = 8.0
"""As how many of a sequence's own drafts the mean of its tenant's counts."""
PRIOR_RIGHT, PRIOR_COMPARED = 3.0, 3.75
"""As so many right drafts of so many a tenant's first ones begin."""


@dataclass(slots=True)
class Acceptance:
    """``right`` of ``compared`` drafts were right; old ones count less. Rehearsed rounds would have
    saved ``saved`` plain steps."""

    right: float = 0.0
    compared: float = 0.0
    saved: float = 0.0

    def compare(self, right: int, drafted: int, drafting: int = 1) -> None:
        """Note that the first ``right`` of so many drafts were right and the next one was not, in a
        round in which ``drafting`` sequences are compared."""
        decay = DECAY ** (1 / drafting)
        self.right = self.right * decay + right
        self.compared = self.compared * decay + right + (right < drafted)


@dataclass(slots=True, eq=False)
class DraftHistory:
    """How the rounds of one sequence went, and those of all of its ``tenant``. ``forbidden``: a
    mask forbade the draft behind those of the latest round. ``rounds`` followed each other without
    a plain step and gained ``balance`` seconds; drafts gave it ``lead`` more tokens than steps.
    ``failed`` trials in a row gained nothing or were not begun; the next one begins at token
    ``next_trial_at`` or later. ``rehearsed`` are the drafts of a rehearsed round that began when
    ``rehearsed_at`` tokens were known."""

    tenant: Acceptance = field(default_factory=Acceptance)
    own: Acceptance = field(default_factory=Acceptance)
    forbidden: bool = False
    rounds: int = 0
    balance: float = 0.0
    lead: float = 0.0
    failed: int = 0
    next_trial_at: int = 0
    rehearsed: list[int] = field(default_factory=list)
    rehearsed_at: int = 0

    def compare(self, right: int, drafted: int, drafting: int = 1) -> None:
        """See ``Acceptance.compare``."""
        self.own.compare(right, drafted)
        self.tenant.compare(right, drafted, drafting)

    def note(self, tokens: int, drafted: int, drafting: int = 1) -> None:
        """Note that a round with ``drafted`` tokens, one of ``drafting`` sequences, yielded
        ``tokens``, including the one that a plain step yields."""
        self.rounds += 1
        self.rehearsed = []
        self.compare(tokens - 1, drafted, drafting)

    def interrupt(self) -> None:
        """A plain step follows."""
        self.rounds, self.balance = 0, 0.0

    @property
    def part_right(self) -> float:
        """The estimated part of the sequence's drafts that are right."""
        own = self.own
        return (own.right + COMMON_TRIALS * self.tenant_right) / (own.compared + COMMON_TRIALS)

    @property
    def tenant_right(self) -> float:
        """The estimated part of the tenant's drafts that are right."""
        return (self.tenant.right + PRIOR_RIGHT) / (self.tenant.compared + PRIOR_COMPARED)
