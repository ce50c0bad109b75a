"""What clients and observers count, to be compared with the engine's ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container

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

    def keep_only(self, tenants: Container[int]) -> None:
        """Forget those that are gone: so does the ledger."""
        for tenant in [tenant for tenant in self._seen if tenant not in tenants]:
            del self._seen[tenant]

    def compare(self, ledger: Ledger, *, interrupted: bool = False) -> None:
        """Raise Violation where the ledger says something else. Where steps were ``interrupted`` an
        admission may be noted of which nobody was told, but no token."""
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
            for what in ("slots_admitted", "slots_preempted") if interrupted else ():
                del said[what], seen[what]
            if +said != +seen:
                raise Violation(
                    Invariant.LEDGER,
                    f"tenant {tenant}: the ledger has {+said - +seen} too many and "
                    f"{+seen - +said} too few",
                )
