"""Tenants that always have requests, in an engine of virtual time, and the tokens they get."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

from contract.types import Request, Tenant, TokenEvent
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner, StepSeconds
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import Drafter
from reference.limits import Limits
from reference.observer import NO_OBSERVER, Observer
from reference.sched.tenants import Tenants

Delivered = Sequence[tuple[float, int]]
"""The (seconds, tenant) of every token, in order."""


class Crowd:
    """Tenants with a constant number of requests, ``sizes``, in an engine. ``ask`` makes the next
    request of a tenant, given its number."""

    def __init__(
        self,
        engine: Engine,
        clock: VirtualClock,
        sizes: dict[int, int],
        ask: Callable[[int, int], Request],
    ) -> None:
        self.delivered: list[tuple[float, int]] = []
        self._engine, self._clock, self._sizes, self._ask = engine, clock, sizes, ask
        self._owner: dict[int, int] = {}
        self._next = 1000
        self._live: Counter[int] = Counter()

    def refill(self, events: Iterable[TokenEvent] = ()) -> None:
        """Note events, and submit a request for each that ended."""
        for event in events:
            tenant = self._owner.get(event.request_id)
            if tenant is None:
                continue
            self.delivered.append((self._clock(), tenant))
            if event.finish_reason is not None:
                del self._owner[event.request_id]
                self._live[tenant] -= 1
        for tenant, size in self._sizes.items():
            while self._live[tenant] < size:
                self._next += 1
                self._engine.submit(self._ask(tenant, self._next))
                self._owner[self._next] = tenant
                self._live[tenant] += 1

    def give_up(self, tenant: int, random: Random) -> None:
        """Cancel one of a tenant's requests."""
        own = [number for number, owner in self._owner.items() if owner == tenant]
        if own:
            number = random.choice(own)
            self._engine.cancel(number)
            del self._owner[number]
            self._live[tenant] -= 1


def token_counts(
    delivered: Delivered, window_seconds: float, begin: float, end: float
) -> Iterator[tuple[float, Counter[int]]]:
    """Each moment at which a window between ``begin`` and ``end`` seconds ends with a token, and
    how many tokens each tenant got in that window."""
    counts: Counter[int] = Counter()
    window: deque[tuple[float, int]] = deque()
    for moment, tenant in delivered:
        if not begin <= moment <= end:
            continue
        window.append((moment, tenant))
        counts[tenant] += 1
        while window[0][0] <= moment - window_seconds:
            counts[window.popleft()[1]] -= 1
        if moment >= begin + window_seconds:
            yield moment, counts


def timed_engine(
    limits: Limits,
    options: EngineOptions,
    tenants: Sequence[Tenant],
    step_seconds: float,
    *,
    drafter: Drafter | None = None,
    observer: Observer = NO_OBSERVER,
) -> tuple[Engine, VirtualClock]:
    """An engine whose steps take ``step_seconds`` each and compute no model; it has recurrent
    states where ``limits`` has room to save some."""
    clock = VirtualClock()
    # It has the interface of a ModelRunner, but is none.
    runner: Any = SimulatedRunner(
        limits, clock, recurrent=limits.saved_states > 0, seconds=StepSeconds(fixed=step_seconds)
    )
    engine = Engine(
        runner,
        options,
        tenants=Tenants(tenants, clock=clock),
        clock=clock,
        drafter=drafter,
        observer=observer,
    )
    return engine, clock
