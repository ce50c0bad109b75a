"""Counts of what clients and observers saw, to be compared with the engine's usage."""

from collections import Counter, defaultdict
from collections.abc import Container

from contract.types import FinishReason
from harness.simulation.invariants import Invariant, Violation
from reference.usage import UsageCounters


class ExpectedCounts:
    """For each tenant, the counts that its ``TenantStatistics`` should have."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def add(self, tenant: int, what: str, count: int = 1) -> None:
        """Add to the count called ``what``: a field of ``TenantStatistics``, or the value of the
        reason of a finished request."""
        self._seen[tenant][what] += count

    def keep_only(self, tenants: Container[int]) -> None:
        """Forget all other tenants, as the usage counters do."""
        for tenant in [tenant for tenant in self._seen if tenant not in tenants]:
            del self._seen[tenant]

    def compare(
        self, usage: UsageCounters, *, interrupted: bool = False, call_interrupted: bool = False
    ) -> None:
        """Raise Violation where the usage differs. Where steps were ``interrupted``, the usage
        may have admissions and preemptions that no observer was called for; where another call was,
        it may have a refusal twice. It never has other prompts, cancels or tokens."""
        uncertain = ["slots_admitted", "slots_preempted"] if interrupted else []
        if call_interrupted:
            uncertain.append("requests_rejected")
        for tenant, seen in self._seen.items():
            entry = usage.of(tenant)
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
            for what in uncertain:
                del said[what], seen[what]
            if +said != +seen:
                raise Violation(
                    Invariant.USAGE,
                    f"tenant {tenant}: the usage has {+said - +seen} too many and "
                    f"{+seen - +said} too few",
                )
