"""Chooses the next request to admit and the one to preempt: by class, share and age."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import field
from typing import NamedTuple

from contract.lazy_dataclass import dataclass
from contract.types import Clock, QosClass
from reference.sched.tenants import Tenants

RECENT_RUNS = 64
"""The number of requests over which the time in a slot is averaged."""
RETRY_SECONDS_MIN = 1.0


class WaitingRequest(NamedTuple):
    """A waiting request as this policy sees it.

    ``order`` numbers requests by arrival and never changes. It waits ``since`` this time, in
    seconds: its arrival, or its preemption if it had made progress before. ``pages`` is the number
    it needs to start, ``qos`` the class it asks for."""

    order: int
    tenant: int
    since: float
    pages: int
    qos: QosClass | None = None


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant for one class. ``orders`` is a heap of their orders, which
    may still contain removed requests; ``live`` is the number that wait. The line has not been
    empty ``since`` this time."""

    since: float
    orders: list[int] = field(default_factory=list)
    live: int = 0


@dataclass(slots=True)
class _Group:
    """The lines of a tenant by requested class; ``since`` is when the first of them began."""

    since: float
    lines: dict[QosClass | None, _Line] = field(default_factory=dict)


class _Turn(NamedTuple):
    """The sort key of a candidate whose tenant is not aged: the rank of its class; its tenant's
    dominant share; its tenant's recent slots by weight; the first arrival among its tenant's
    candidates of this rank; the time since which its line is aged, infinity if it is not; its own
    arrival."""

    rank: int
    share: float
    recent: float
    first: int
    since: float
    order: int


class WaitQueue:
    """Waiting requests, and the choice among them.

    A *line* is the waiting requests of one tenant that ask for one class; requests that ask for
    none form one line. Within a line the order of arrival decides, so each line has one candidate:
    its first request that can begin. A candidate beyond its tenant's own quotas is skipped and
    blocks nobody. Of the others the most urgent class comes first, in it the tenant with the lowest
    dominant share; of equal shares the tenant that held the fewest recent slots, by weight; then
    the request that arrived first. A candidate for which there is no room lets others pass.

    A *tenant* is aged when its requests have waited for ``aging_seconds`` in which none of them, of
    whatever class, had a slot and made progress in it. Then its first candidate comes before all
    candidates of tenants that are not aged, whatever the classes and shares. Aged tenants take
    turns in the order in which this wait began, and no other request passes one. So aging changes
    no fair share: a tenant that has a slot does not age, however many of its requests wait.

    A line may be aged too. This changes the order within its tenant only: its candidate takes the
    tenant's next turn, as a request of the tenant's own class. So a tenant's stream of requests of
    a better class does not starve its requests of a lower one.

    Starvation bound: let T tenants have requests waiting, and let room for any one request appear
    within R seconds whenever no request is admitted (at the latest when all running requests have
    ended). Then a tenant with requests waiting is without a slot for at most ``aging_seconds + T *
    R`` seconds, time beyond its quotas not counted. Reason: once it is aged no tenant passes it
    twice, since an admission puts that tenant behind it. So the n-th request of a tenant whose
    requests run for at most L seconds starts after at most ``n * (aging_seconds + T * R + L)``
    seconds.

    A choice takes time in proportion to the number of lines, whatever their length; pushing and
    removing is logarithmic, amortized."""

    def __init__(self, tenants: Tenants, *, clock: Clock, aging_seconds: float = 10.0) -> None:
        self._tenants = tenants
        self._clock = clock
        self._aging = aging_seconds
        self._groups: dict[int, _Group] = {}
        self._waiting: dict[int, WaitingRequest] = {}
        self._began: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._runs: deque[float] = deque(maxlen=RECENT_RUNS)

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiting: WaitingRequest) -> None:
        """Add a request. Raises RequestError if its tenant is unknown."""
        assert waiting.order not in self._waiting, f"request {waiting.order} waits twice"
        self._tenants[waiting.tenant]
        group = self._groups.setdefault(waiting.tenant, _Group(waiting.since))
        line = group.lines.setdefault(waiting.qos, _Line(waiting.since))
        # A request that lost its slot without progress has waited longer than those after it.
        group.since = min(group.since, waiting.since)
        line.since = min(line.since, waiting.since)
        began = self._began.pop(waiting.order, None)
        if began is not None:
            self._ran[waiting.order] = self._ran.get(waiting.order, 0.0) + self._clock() - began
        heapq.heappush(line.orders, waiting.order)
        line.live += 1
        self._waiting[waiting.order] = waiting

    def remove(self, order: int) -> None:
        """Remove a request; does nothing if it does not wait."""
        waiting = self._waiting.pop(order, None)
        if waiting is None:
            return
        group = self._groups[waiting.tenant]
        line = group.lines[waiting.qos]
        line.live -= 1
        if not line.live:
            del group.lines[waiting.qos]
            if not group.lines:
                del self._groups[waiting.tenant]
        elif len(line.orders) > 2 * line.live:
            line.orders = sorted(order for order in line.orders if order in self._waiting)

    def clear(self) -> None:
        """Remove all requests, also after an interrupted call."""
        self._groups, self._waiting = {}, {}

    def next(self, fits: Callable[[WaitingRequest], bool | None]) -> WaitingRequest | None:
        """Remove and return the request to admit now; None if none can be admitted.

        ``fits`` says whether there is room for a request, or None if it cannot start yet; then all
        others, also those after it in its line, may pass it, even if it is aged. Quotas of tenants
        are checked here, so ``Tenants.occupy`` must be called for an admitted request before the
        next call. ``fits`` may give the request its slot and push the requests that it preempts,
        which compete from the next call on. A tenant that has a slot by then is no longer aged."""
        unable: set[int] = set()
        asked = -1
        while asked < len(unable):
            asked = len(unable)
            for waiting, aged in self._in_turn(unable):
                room = fits(waiting)
                if room:
                    self.remove(waiting.order)
                    self._began[waiting.order] = self._clock()
                    return waiting
                if room is None:
                    unable.add(waiting.order)
                    break
                if aged:
                    return None
        return None

    def ended(self, order: int) -> None:
        """Record the end of a request; one without a slot does not count for the mean time in
        one."""
        before, began = self._ran.pop(order, 0.0), self._began.pop(order, None)
        if began is not None:
            self._runs.append(before + self._clock() - began)

    def retry_after(self) -> float:
        """An estimate of the seconds until the next admission: the mean time that the latest
        requests held their slots, divided by the slots held now; at least RETRY_SECONDS_MIN."""
        if self._runs:
            mean = sum(self._runs) / len(self._runs)
        elif self._began:
            mean = self._clock() - min(self._began.values())
        else:
            return RETRY_SECONDS_MIN
        return max(RETRY_SECONDS_MIN, mean / max(1, len(self._began)))

    def aged(self, tenant: int, qos: QosClass | None = None) -> bool:
        """Whether the tenant, or its line for class ``qos``, waited too long without progress."""
        return self.tenant_aged(tenant) or self.line_aged_since(tenant, qos) is not None

    def line_aged_since(self, tenant: int, qos: QosClass | None = None) -> float | None:
        """The time since which an aged line waits without a slot; None if it is not aged."""
        group = self._groups.get(tenant)
        line = None if group is None else group.lines.get(qos)
        return None if line is None else self._line_aged_since(tenant, qos, line)

    def tenant_aged(self, tenant: int) -> bool:
        """Whether a tenant is aged: its first request comes before those of others."""
        group = self._groups.get(tenant)
        return group is not None and self._tenant_aged_since(tenant, group) is not None

    def _tenant_aged_since(self, tenant: int, group: _Group) -> float | None:
        """The time since which an aged tenant waits without a slot; None if it is not aged."""
        return self._since(self._tenants.tenant_slotless_since(tenant), group.since)

    def _line_aged_since(self, tenant: int, qos: QosClass | None, line: _Line) -> float | None:
        return self._since(self._tenants.slotless_since(tenant, qos), line.since)

    def _since(self, slotless: float | None, waiting: float) -> float | None:
        if slotless is None:
            return None
        since = max(slotless, waiting)
        return since if self._clock() - since >= self._aging else None

    def _in_turn(self, unable: Collection[int]) -> Iterator[tuple[WaitingRequest, bool]]:
        """The candidates within their quotas in the order of their turns, each with whether its
        tenant is aged. Requests ``unable`` to start are skipped."""
        aged: list[tuple[float, list[int]]] = []
        others: dict[int, list[_Turn]] = {}
        alone = len(self._groups) == 1
        for tenant, group in self._groups.items():
            turns = self._turns_of(tenant, group, alone, unable)
            since = self._tenant_aged_since(tenant, group) if turns else None
            if since is not None:
                own = sorted(turns, key=lambda turn: (turn.since, *turn))
                aged.append((since, [turn.order for turn in own]))
                continue
            for turn in turns:
                others.setdefault(turn.rank, []).append(turn)
        for _, orders in sorted(aged):
            for order in orders:
                yield self._waiting[order], True
        for _, turns in sorted(others.items()):
            for turn in sorted(turns):
                yield self._waiting[turn.order], False

    def _turns_of(
        self, tenant: int, group: _Group, alone: bool, unable: Collection[int]
    ) -> list[_Turn]:
        """The candidates of a tenant that are within its quotas. The shares of a tenant that is
        ``alone`` are not computed."""
        tenants = self._tenants
        own = tenants[tenant].qos
        found = []
        first: dict[int, int] = {}
        for asked, line in group.lines.items():
            order = self._candidate(line, unable)
            if order is None or not tenants.within_quota(tenant, self._waiting[order].pages):
                continue
            since = self._line_aged_since(tenant, asked, line)
            rank = (own if since is not None else own.lowered_to(asked)).rank
            first[rank] = min(order, first.get(rank, order))
            found.append((rank, math.inf if since is None else since, order))
        if not found:
            return []
        share = 0.0 if alone else tenants.dominant_share(tenant)
        recent = 0.0 if alone else tenants.recent_slots(tenant)
        return [
            _Turn(rank, share, recent, first[rank], since, order) for rank, since, order in found
        ]

    def _candidate(self, line: _Line, unable: Collection[int]) -> int | None:
        while line.orders[0] not in self._waiting:
            heapq.heappop(line.orders)
        if line.orders[0] not in unable:
            return line.orders[0]
        able = (order for order in line.orders if order in self._waiting and order not in unable)
        return min(able, default=None)


class RunningRequest(NamedTuple):
    """A running request of class ``qos`` as this policy sees it, with its ``slot`` and number of
    ``pages``. A ``protected`` one had waited too long and has not made progress yet."""

    order: int
    tenant: int
    qos: QosClass
    slot: int
    pages: int
    protected: bool


def choose_victim(
    running: Sequence[RunningRequest], tenants: Tenants, claimant: QosClass | None
) -> RunningRequest | None:
    """The request to preempt so that a request of class ``claimant`` gets room; None if there is
    none.

    Only unprotected requests of a class below the claimant's can be preempted, so never an
    interactive one. The choice is the youngest request of the tenant with the highest dominant
    share in the lowest class.

    Without a claimant memory must be freed, and any request can be preempted: by class, within a
    class protected ones last, then by share and age."""
    if claimant is not None:
        running = [e for e in running if not e.protected and e.qos.rank > claimant.rank]
    shares = {tenant: tenants.dominant_share(tenant) for tenant in {e.tenant for e in running}}
    return max(
        running,
        key=lambda e: (e.qos.rank, not e.protected, shares[e.tenant], e.order),
        default=None,
    )


def may_wait(own: int, waiting: int, depth: int, tenants: int) -> bool:
    """Whether one more request of a tenant may wait.

    ``own`` requests of it and ``waiting`` requests of all ``tenants`` together wait already; at
    most ``depth`` may. With several tenants, one may not have more waiting requests than the queue
    has free entries, so an entry is always left for another (dynamic thresholds with factor 1:
    Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998)."""
    free = depth - waiting
    return free > 0 and (tenants == 1 or own < free)
