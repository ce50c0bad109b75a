"""The quotas of each tenant and its usage: slots, pages, recent slots, and token rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial
from itertools import count
from typing import NamedTuple

from contract.errors import ConfigError, RequestError
from contract.lazy_dataclass import dataclass
from contract.types import LOCAL_TENANT, Clock, QosClass, Request, Tenant
from reference.memory.prefix import Scope, scope_of
from reference.sched.rates import RateWindow

SHARE_SECONDS = 30.0
"""The time constant of a tenant's mean number of recent slots."""
PART_OF_A_SLOT = 63 / 64
"""The most that recent slots add to the slots a tenant holds now. It is less than one slot, so
whole slots are divided by what tenants hold now, and only a left-over slot rotates among them."""


class Usage(NamedTuple):
    """The usage of a tenant: ``slots`` and ``pages`` held now, ``live`` requests waiting or
    running, and tokens per second over the window."""

    slots: int
    pages: int
    live: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


def distinct(tenants: Iterable[Tenant]) -> list[Tenant]:
    """The tenants. Raises ConfigError for an invalid one or an id that occurs twice."""
    found: dict[int, Tenant] = {}
    for tenant in tenants:
        tenant.validate()
        if tenant.id in found:
            other = found[tenant.id].name
            raise ConfigError(f"tenants {other!r} and {tenant.name!r} share id {tenant.id}")
        found[tenant.id] = tenant
    return list(found.values())


@dataclass(slots=True)
class _Account:
    """A tenant and its usage in every engine; an engine is a holder.

    Slots are counted by the requested class; pages and live requests in all. ``served`` is, by
    class, when a request last gave back a slot in which it had made progress. ``recent`` is
    slot-seconds, seconds with requests, and the time up to which both are counted; older ones decay
    exponentially."""

    tenant: Tenant
    slots: dict[tuple[Hashable, QosClass | None], int] = field(default_factory=dict)
    pages: dict[Hashable, int] = field(default_factory=dict)
    live: dict[Hashable, int] = field(default_factory=dict)
    served: dict[QosClass | None, float] = field(default_factory=dict)
    decoded: RateWindow = field(default_factory=RateWindow)
    prefilled: RateWindow = field(default_factory=RateWindow)
    recent: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def recent_at(self, now: float) -> tuple[float, float, float]:
        """``recent`` at ``now`` seconds."""
        slot_seconds, seconds, moment = self.recent
        fade = math.exp(-max(0.0, now - moment) / SHARE_SECONDS) if self.requests else 1.0
        gained = SHARE_SECONDS * (1.0 - fade)
        return self.slots_held * gained + fade * slot_seconds, gained + fade * seconds, now

    @property
    def slots_held(self) -> int:
        return sum(self.slots.values())

    @property
    def pages_held(self) -> int:
        return sum(self.pages.values())

    @property
    def requests(self) -> int:
        return sum(self.live.values())


class Tenants:
    """The registry of tenants, and the usage of each. ``changes`` counts changes of the registry.
    The time of a call for one tenant does not grow with the number of tenants and requests, except
    when isolation groups change.

    A scope ends when no tenant shares it any more. ``forget`` is called with the scope before that,
    to remove its cached data that no engine holds, such as files.

    Raises ConfigError for an invalid tenant or an id that occurs twice."""

    def __init__(
        self,
        tenants: Iterable[Tenant] = (LOCAL_TENANT,),
        *,
        clock: Clock,
        forget: Callable[[Scope], None] = lambda scope: None,
    ) -> None:
        self._clock = clock
        self._forget = forget
        self._accounts: dict[int, _Account] = {}
        self._removed: set[int] = set()
        self._numbers = count()
        self._born: dict[Scope, int] = {}
        self.changes = 0
        self.put(*distinct(tenants))

    def __getitem__(self, id: int) -> Tenant:
        """The tenant. Raises RequestError when no tenant has this id."""
        account = self._accounts.get(id)
        return (self._account(id) if account is None else account).tenant

    def __iter__(self) -> Iterator[Tenant]:
        return (account.tenant for account in self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, id: int) -> bool:
        return id in self._accounts

    def put(self, *tenants: Tenant) -> None:
        """Add or change tenants in one change, effective from the next decision on. A lowered quota
        takes nothing back. Raises ConfigError if a tenant is invalid."""
        for tenant in tenants:
            tenant.validate()
        known = [tenant for tenant in tenants if tenant.id in self]
        self._end_scopes({one.id for one in known if scope_of(self[one.id]) != scope_of(one)})
        for tenant in tenants:
            account = self._accounts.get(tenant.id)
            if account is None:
                self._accounts[tenant.id] = _Account(tenant)
            else:
                account.tenant = tenant
            self._removed.discard(tenant.id)
        self.changes += 1

    @property
    def scopes(self) -> dict[Scope, int]:
        """Each scope that a tenant uses, and a number that is unique to this life of the scope."""
        born, numbers = self._born, self._numbers
        return {scope: born.setdefault(scope, next(numbers)) for scope in map(scope_of, self)}

    def members(self, scope: Scope) -> list[str | int]:
        """The ids and names of the tenants that share a scope, by id."""
        own = sorted((one.id, one.name) for one in self if scope_of(one) == scope)
        return [part for member in own for part in member]

    def _end_scopes(self, ids: Collection[int]) -> None:
        """End the scopes that nobody uses once these tenants have left theirs. Repeating an
        interrupted change ends them again, which is harmless."""
        left = {scope_of(self[id]) for id in ids}
        if any(kind == "group" for kind, *_ in left):
            left -= {scope_of(tenant) for tenant in self if tenant.id not in ids}
        for scope in left:
            self._forget(scope)
            self._born.pop(scope, None)

    def begin_removal(self, id: int) -> None:
        """Refuse new requests of a tenant, which is removed when its last request has ended. Raises
        RequestError if no tenant has this id."""
        self._account(id)
        self._removed.add(id)
        self.changes += 1

    @property
    def removing(self) -> bool:
        """Whether a removed tenant is not forgotten yet."""
        return bool(self._removed)

    def is_removed(self, id: int) -> bool:
        """Whether the tenant was removed and still has requests."""
        return id in self._removed

    def finish_removals(self) -> None:
        """Forget the removed tenants that have no requests left.

        An engine that was interrupted while it ended a request holds its slot and pages until it
        recovers; its tenant is forgotten then."""
        for id in tuple(self._removed):
            account = self._accounts.get(id)
            if account is not None:
                if account.requests or account.slots_held or account.pages_held:
                    continue
                self.remove(id)
            self._removed.discard(id)

    def remove(self, id: int) -> None:
        """Forget a tenant. Raises RequestError while it has live requests, or when no tenant has
        this id."""
        account = self._account(id)
        live, held = account.requests, account.slots_held + account.pages_held
        if live:
            raise RequestError("tenant", f"{id} has {live} live requests; end them first")
        assert not held, f"tenant {id} holds what no request holds"
        self._end_scopes({id})
        self.changes += 1
        del self._accounts[id]

    @property
    def reservations(self) -> dict[int, int]:
        """The pages reserved by each tenant that reserves any and was not removed."""
        return {
            tenant.id: tenant.reserved_pages
            for tenant in self
            if tenant.reserved_pages and tenant.id not in self._removed
        }

    def class_of(self, request: Request) -> QosClass:
        """The class in which a request is served."""
        return self[request.tenant].qos.lowered_to(request.qos)

    def occupy(
        self,
        id: int,
        slots: int = 0,
        pages: int = 0,
        live: int = 0,
        *,
        qos: QosClass | None = None,
        holder: Hashable = None,
        served: bool = True,
    ) -> None:
        """Change what the tenant holds by signed amounts. ``qos`` is the class that the requests of
        these slots ask for. ``served`` False: the request gives back its slot without having made
        progress."""
        account, now = self._account(id), self._clock()
        if slots or live:
            account.recent = account.recent_at(now)
        if slots:
            if slots < 0 and served:
                account.served[qos] = now
            key = holder, qos
            account.slots[key] = account.slots.get(key, 0) + slots
            assert account.slots[key] >= 0, f"tenant {id} gave back twice"
        if pages:
            self.set_pages(id, account.pages.get(holder, 0) + pages, holder)
        if live:
            account.live[holder] = account.live.get(holder, 0) + live
            assert account.live[holder] >= 0, f"tenant {id} gave back twice"

    def set_pages(self, id: int, pages: int, holder: Hashable = None) -> None:
        """Set how many of a holder's pages are charged to the tenant."""
        assert pages >= 0, f"tenant {id} gave back twice"
        self._account(id).pages[holder] = pages

    def reset_holder(self, holder: Hashable, live: Mapping[int, int]) -> None:
        """Set the usage of a holder, an engine, to no slots, no pages and ``live`` requests by
        tenant. An engine calls it when it recovers from an interrupt."""
        now = self._clock()
        for id, account in self._accounts.items():
            account.recent = account.recent_at(now)
            own = {holder: live[id]} if live.get(id) else {}
            # One assignment each, requests first: if an interrupt comes between them, a removed
            # tenant that has requests still has some here, and is not forgotten.
            account.live = {key: n for key, n in account.live.items() if key != holder} | own
            account.slots = {key: n for key, n in account.slots.items() if key[0] != holder}
            account.pages = {key: n for key, n in account.pages.items() if key != holder}
            account.decoded.recount()
            account.prefilled.recount()

    def count(self, id: int, prefilled: int, decoded: int) -> None:
        """Count tokens computed now towards the tenant's rates."""
        self.counter(id)(prefilled, decoded)

    def counter(self, id: int) -> Callable[[int, int], None]:
        """A function that counts tokens for this tenant, even after another one got its id."""
        return partial(self._count, self._account(id))

    def _count(self, account: _Account, prefilled: int, decoded: int) -> None:
        now = self._clock()
        account.prefilled.add(now, prefilled)
        account.decoded.add(now, decoded)

    def held(self, id: int) -> tuple[int, int]:
        """Slots and pages that the tenant holds now."""
        account = self._account(id)
        return account.slots_held, account.pages_held

    def usage(self, id: int) -> Usage:
        """Current usage of the tenant."""
        account, now = self._account(id), self._clock()
        decoded = account.decoded.per_second(now)
        prefilled = account.prefilled.per_second(now)
        return Usage(account.slots_held, account.pages_held, account.requests, decoded, prefilled)

    def slotless_since(self, id: int, qos: QosClass | None = None) -> float | None:
        """When the tenant's requests for class ``qos`` last gave back a slot in which they had made
        progress; -inf if they never did, None while they hold a slot."""
        account = self._account(id)
        if any(held for (_, asked), held in account.slots.items() if asked is qos):
            return None
        return account.served.get(qos, -math.inf)

    def tenant_slotless_since(self, id: int) -> float | None:
        """As ``slotless_since``, for all requests of the tenant."""
        account = self._account(id)
        if account.slots_held:
            return None
        return max(account.served.values(), default=-math.inf)

    def within_quota(self, id: int, pages: int) -> bool:
        """Whether a request of ``pages`` pages may be admitted: one more slot and its pages are
        within the quotas, and both rates are below theirs.

        The only running request of a tenant may exceed the quota of pages: it was checked when it
        was submitted, and a quota lowered since then must not make it wait forever."""
        account = self._account(id)
        tenant = account.tenant
        slots = account.slots_held
        beyond = slots and account.pages_held + pages > tenant.max_kv_pages
        if slots >= tenant.max_slots or beyond:
            return False
        now = self._clock()
        return (
            account.decoded.per_second(now) < tenant.decode_tokens_per_s
            and account.prefilled.per_second(now) < tenant.prefill_tokens_per_s
        )

    def rates_free_in(self, id: int) -> float:
        """Seconds until both rates of the tenant are below their quotas if nothing more is computed
        for it; 0 if they already are."""
        account, now = self._account(id), self._clock()
        tenant = account.tenant
        return max(
            account.decoded.below_in(now, tenant.decode_tokens_per_s),
            account.prefilled.below_in(now, tenant.prefill_tokens_per_s),
        )

    def dominant_share(self, id: int) -> float:
        """The tenant's dominant share: the larger of its used parts of the slot quota and the page
        quota, divided by its weight (weighted dominant resource fairness, Ghodsi et al. 2011).

        Slots are whole, so a slot that is left over rotates: recent slots above those held now add
        up to PART_OF_A_SLOT."""
        account = self._account(id)
        tenant, held = account.tenant, account.slots_held
        slots = max(held, min(self._mean_slots(account), held + PART_OF_A_SLOT))
        part = max(slots / tenant.max_slots, account.pages_held / tenant.max_kv_pages)
        return part / tenant.weight

    def recent_slots(self, id: int) -> float:
        """The mean number of slots that the tenant held recently while it had requests, divided by
        its weight."""
        account = self._account(id)
        return self._mean_slots(account) / account.tenant.weight

    def _mean_slots(self, account: _Account) -> float:
        slot_seconds, seconds, _ = account.recent_at(self._clock())
        return slot_seconds / seconds if seconds else 0.0

    def _account(self, id: int) -> _Account:
        try:
            return self._accounts[id]
        except KeyError:
            raise RequestError("tenant", f"{id!r} is not known here") from None
