"""The acceptance of the tokens drafted for a sequence and for a tenant."""

from __future__ import annotations

from dataclasses import field

from contract.lazy_dataclass import dataclass

DECAY = 0.97
"""The weight of earlier drafts in the acceptance rate, after each round."""
TENANT_WEIGHT = 8.0
"""The acceptance rate of the tenant counts as this many drafts of a new sequence."""
PRIOR_ACCEPTED, PRIOR_COMPARED = 3.0, 3.75
"""As so many right drafts of so many a tenant's first ones begin."""


@dataclass(slots=True)
class Acceptance:
    """Of ``compared`` drafts, ``accepted`` were right; older ones weigh less. Shadow rounds would
    have saved ``saved_steps`` plain steps."""

    accepted: float = 0.0
    compared: float = 0.0
    saved_steps: float = 0.0

    def compare(self, right: int, drafted: int, drafting: int = 1) -> None:
        """Record a round in which the first ``right`` of ``drafted`` drafts were accepted and the
        next one, if any, was not. It has ``drafting`` sequences, which are compared one by one."""
        decay = DECAY ** (1 / drafting)
        self.accepted = self.accepted * decay + right
        self.compared = self.compared * decay + right + (right < drafted)


@dataclass(slots=True, eq=False)
class DraftHistory:
    """The rounds of one sequence, and the acceptance of its ``tenant``.

    - ``forbidden``: a mask forbade the draft after those of the latest round.
    - ``rounds`` is the number of rounds since the last plain step, ``balance`` the seconds they
      gained.
    - ``lead`` is how many more tokens than steps the sequence has had.
    - ``failed`` counts consecutive trials that gained nothing or were not started. The next one may
      start at token ``next_trial_at``.
    - ``shadow_drafts`` are the drafts of the shadow round, which started at token
      ``shadow_start``."""

    tenant: Acceptance = field(default_factory=Acceptance)
    own: Acceptance = field(default_factory=Acceptance)
    forbidden: bool = False
    rounds: int = 0
    balance: float = 0.0
    lead: float = 0.0
    failed: int = 0
    next_trial_at: int = 0
    shadow_drafts: list[int] = field(default_factory=list)
    shadow_start: int = 0

    def compare(self, right: int, drafted: int, drafting: int = 1) -> None:
        """See ``Acceptance.compare``."""
        self.own.compare(right, drafted)
        self.tenant.compare(right, drafted, drafting)

    def note(self, tokens: int, drafted: int, drafting: int = 1) -> None:
        """Record a round with ``drafted`` drafts, one of ``drafting`` sequences, that yielded
        ``tokens`` tokens, including the one that a plain step yields."""
        self.rounds += 1
        self.shadow_drafts = []
        self.compare(tokens - 1, drafted, drafting)

    def interrupt(self) -> None:
        """Record that a plain step follows."""
        self.rounds, self.balance = 0, 0.0

    @property
    def acceptance_rate(self) -> float:
        """The estimated part of the sequence's drafts that are accepted."""
        own = self.own
        return (own.accepted + TENANT_WEIGHT * self.tenant_acceptance_rate) / (
            own.compared + TENANT_WEIGHT
        )

    @property
    def tenant_acceptance_rate(self) -> float:
        """The estimated part of the tenant's drafts that are accepted."""
        return (self.tenant.accepted + PRIOR_ACCEPTED) / (self.tenant.compared + PRIOR_COMPARED)
