"""What clients and observers count, to be compared with the engine's ledger."""

from __future__ import annotations

from collections import Counter, defaultdict

from contract.types import FinishReason
from harness.simulation.invariants import Invariant, Violation
from reference.ledger import Ledger


class ExpectedCounts:
    """By tenant, how often something named as in ``TenantLedger`` was seen to happen."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def add(self, tenant: int, what: str, count: int = 1) -> None:
        """Seen, so many times. A finished request is counted by its reason's value."""
        self._seen[tenant][what] += count

    def compare(self, ledger: Ledger) -> None:
        """Raise Violation where the ledger says something else."""
        for tenant, seen in self._seen.items():
            entry = ledger.of(tenant)
            said = Counter(
                {
                    "requests_rejected": entry.requests_rejected,
                    "tokens_prompted": entry.tokens_prompted,
                    "tokens_generated": entry.tokens_generated,
                    "slots_admitted": entry.slots_admitted,
                    "slots_preempted": entry.slots_preempted,
                }
            )
            for reason in FinishReason:
                said[reason.value] = entry.requests_finished.get(reason, 0)
            if +said != +seen:
                raise Violation(
                    Invariant.LEDGER,
                    f"tenant {tenant}: the ledger has {+said - +seen} too many and "
                    f"{+seen - +said} too few",
                )
