"""Who is admitted next, and who has to make room: by class, dominant share and age."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import NamedTuple

from contract.lazy_dataclass import dataclass
from contract.types import Clock, QosClass
from reference.sched.tenants import Tenants

RECENT_RUNS = 64
"""Over how many requests the time that one holds its slot is averaged."""
RETRY_SECONDS_MIN = 1.0


class WaitingRequest(NamedTuple):
    """A request that waits. ``order`` is its arrival, unique and kept for life; ``since`` is when
    it began to wait, which for a preempted request is when it was preempted; ``pages`` is what it
    needs to begin, ``qos`` the class it asks for."""

    order: int
    tenant: int
    since: float
    pages: int
    qos: QosClass | None = None


_LineKey = tuple[int, QosClass | None]


@dataclass(slots=True)
class _Line:
    """Waiting requests by order, those removed meanwhile among them; ``since`` is when the line
    began."""

    since: float
    orders: list[int] = field(default_factory=list)
    live: int = 0


class WaitQueue:
    """Waiting requests, and the choice among them.

    A *line* is what of one tenant asks for one class: all its requests where none asks. Within a
    line the order of arrival decides, so each has one candidate: its first. A candidate beyond its
    tenant's own quotas stands aside, and holds up nobody. Of the others the most urgent class comes
    first, in it the tenant with the lowest dominant share; of equal shares the tenant that was
    given the fewest tokens lately, by weight, so that slots which cannot be divided evenly go round
    however many requests each has waiting; then the request that arrived first. A candidate for
    which there is no room lets others pass.

    A line is *aged* when its requests have waited for ``aging_seconds`` while none of them had a
    slot. Its candidate then comes before all that are not aged, whatever the classes and shares;
    aged candidates go in the order in which they began to wait without a slot; and nobody passes
    one. So aging undoes no fair share: who holds a slot does not age, however many wait behind it.

    Starvation bound: let T lines have requests waiting, and let room for any one request appear
    within R seconds whenever nobody is admitted (at the latest when all that runs has ended). Then
    a line that has requests waiting is without a slot for at most ``aging_seconds + T * R``
    seconds, not counting time beyond its tenant's quotas. Reason: once it is aged no line passes it
    twice, for an admission sends that line behind it. So the n-th request of a line whose requests
    run for at most L seconds starts after at most ``n * (aging_seconds + T * R + L)``.

    A choice takes time in proportion to the lines that have requests waiting, and none for the
    requests behind the first; pushing and removing is logarithmic, amortized.
    """

    def __init__(self, tenants: Tenants, *, clock: Clock, aging_seconds: float = 10.0) -> None:
        self._tenants = tenants
        self._clock = clock
        self._aging = aging_seconds
        self._lines: dict[_LineKey, _Line] = {}
        self._waiting: dict[int, WaitingRequest] = {}
        self._began: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._runs: deque[float] = deque(maxlen=RECENT_RUNS)

    def __len__(self) -> int:
        return len(self._waiting)

    def by_class(self) -> Counter[QosClass]:
        """How many requests of each class wait."""
        counts: Counter[QosClass] = Counter()
        for key, line in self._lines.items():
            counts[self._class_of(key)] += line.live
        return counts

    def of_tenant(self, tenant: int) -> int:
        """How many requests of a tenant wait."""
        return sum(line.live for (id, _), line in self._lines.items() if id == tenant)

    def push(self, waiting: WaitingRequest) -> None:
        """Let a request wait. RequestError when its tenant is not known."""
        assert waiting.order not in self._waiting, f"request {waiting.order} waits twice"
        self._tenants[waiting.tenant]
        key = waiting.tenant, waiting.qos
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(waiting.since)
        began = self._began.pop(waiting.order, None)
        if began is not None:
            self._ran[waiting.order] = self._ran.get(waiting.order, 0.0) + self._clock() - began
        heapq.heappush(line.orders, waiting.order)
        line.live += 1
        self._waiting[waiting.order] = waiting

    def remove(self, order: int) -> None:
        """Forget a request. One that does not wait is already forgotten."""
        waiting = self._waiting.pop(order, None)
        if waiting is None:
            return
        key = waiting.tenant, waiting.qos
        line = self._lines[key]
        line.live -= 1
        if not line.live:
            del self._lines[key]
        elif len(line.orders) > 2 * line.live:
            line.orders = sorted(order for order in line.orders if order in self._waiting)

    def next(self, fits: Callable[[WaitingRequest], bool]) -> WaitingRequest | None:
        """Take the request to admit now out of the queue; None when nobody is to be admitted.

        ``fits`` says whether there is room for a request; tenants' quotas are seen to here, so what
        is admitted must be known to ``Tenants.occupy`` before the next call. It may place the
        request itself and push back those it preempts for it: their turn is in the next call. A
        request that holds its slot already does not count as aged any more.
        """
        for waiting, aged in self._in_turn():
            if fits(waiting):
                self.remove(waiting.order)
                self._began[waiting.order] = self._clock()
                return waiting
            if aged:
                return None
        return None

    def ended(self, order: int) -> None:
        """A request is over. One that never had a slot says nothing of how long others take."""
        before, began = self._ran.pop(order, 0.0), self._began.pop(order, None)
        if began is not None:
            self._runs.append(before + self._clock() - began)

    def retry_after(self) -> float:
        """Seconds until about one more request is admitted: the mean time that the latest requests
        held their slots, divided by the slots held now; at least RETRY_SECONDS_MIN. Time in which
        nothing ran does not count."""
        if self._runs:
            mean = sum(self._runs) / len(self._runs)
        elif self._began:
            mean = self._clock() - min(self._began.values())
        else:
            return RETRY_SECONDS_MIN
        return max(RETRY_SECONDS_MIN, mean / max(1, len(self._began)))

    def aged(self, tenant: int, qos: QosClass | None = None) -> bool:
        """Whether those of the tenant's requests that ask for class ``qos`` have waited too long
        without a slot."""
        line = self._lines.get((tenant, qos))
        return line is not None and self._aged_since((tenant, qos), line) is not None

    def _aged_since(self, key: _LineKey, line: _Line) -> float | None:
        """When an aged line began to wait without a slot; None for one that is not aged."""
        slotless = self._tenants.slotless_since(*key)
        if slotless is None:
            return None
        since = max(slotless, line.since)
        return since if self._clock() - since >= self._aging else None

    def _in_turn(self) -> Iterator[tuple[WaitingRequest, bool]]:
        """The candidates within their quotas, and whether each is aged, in order of their turn."""
        aged: list[tuple[float, int]] = []
        by_rank: dict[int, list[int]] = {}
        for key, line in self._lines.items():
            order = self._candidate(line)
            if not self._tenants.within_quota(key[0], self._waiting[order].pages):
                continue
            since = self._aged_since(key, line)
            if since is None:
                by_rank.setdefault(self._class_of(key).rank, []).append(order)
            else:
                aged.append((since, order))
        for _, order in sorted(aged):
            yield self._waiting[order], True
        for _, orders in sorted(by_rank.items()):
            if len(orders) > 1:
                orders = [order for *_, order in sorted([self._turn_of(order) for order in orders])]
            for order in orders:
                yield self._waiting[order], False

    def _turn_of(self, order: int) -> tuple[float, float, int]:
        """The tenant's dominant share, what it was given lately, by weight, and ``order``."""
        tenant = self._waiting[order].tenant
        rate = self._tenants.usage(tenant).decode_tokens_per_s
        return self._tenants.dominant_share(tenant), rate / self._tenants[tenant].weight, order

    def _class_of(self, key: _LineKey) -> QosClass:
        tenant, asked = key
        return self._tenants[tenant].qos.lowered_to(asked)

    def _candidate(self, line: _Line) -> int:
        while line.orders[0] not in self._waiting:
            heapq.heappop(line.orders)
        return line.orders[0]


class RunningRequest(NamedTuple):
    """A request of class ``qos`` that holds ``slot`` and ``pages`` pages. ``protected`` ones were
    admitted a moment ago, or waited too long: preempting them would undo what their admission was
    for."""

    order: int
    tenant: int
    qos: QosClass
    slot: int
    pages: int
    protected: bool


def victim(
    running: Sequence[RunningRequest], tenants: Tenants, claimant: QosClass | None
) -> RunningRequest | None:
    """Whom to preempt so that a request of class ``claimant`` gets room; None: nobody.

    Only requests of a class below the claimant's that are not protected, so never an interactive
    one: of the lowest class the tenant with the highest dominant share, of it the youngest request.

    Without a claimant memory must be freed at any price, and everybody may be preempted: in order
    of class, in it the protected after the others, then by share and age.
    """
    if claimant is not None:
        running = [e for e in running if not e.protected and e.qos.rank > claimant.rank]
    shares = {tenant: tenants.dominant_share(tenant) for tenant in {e.tenant for e in running}}
    return max(
        running,
        key=lambda e: (e.qos.rank, not e.protected, shares[e.tenant], e.order),
        default=None,
    )
