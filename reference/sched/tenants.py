"""The quotas of each tenant and what it uses: slots and pages now, recent slots, and rates over 5
seconds."""

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
"""The time constant of the mean number of slots that a tenant held recently."""
PART_OF_A_SLOT = 63 / 64
"""A tenant that held more slots recently than it holds now counts as holding at most so much of a
slot more. It is less than one, so that whole slots are divided by what tenants hold now, and only a
slot that is left over goes round."""


class Usage(NamedTuple):
    """Usage of a tenant: ``slots`` and ``pages`` held now, ``live`` requests waiting or running,
    and tokens a second over the window."""

    slots: int
    pages: int
    live: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


@dataclass(slots=True)
class _Account:
    """A tenant and what it uses in every engine, which is a holder: slots by the class asked for,
    pages, and live requests. ``served`` is, by class, when one of its requests last gave back a
    slot in which it had made progress. ``recent`` has its slot-seconds, the seconds in which
    it had requests, and the moment up to which they are counted; older ones count exponentially
    less."""

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
    """The registry of tenants, and what each of them uses. ``changes`` counts the changes of the
    registry. A call for one tenant takes time independent of the number of tenants and requests,
    apart from changes of isolation groups.

    A scope ends where none of those who share it does so after a change. ``forget`` is called with
    it before: it removes what is left of the scope where no engine has it.

    Raises ConfigError for a tenant that is not valid or an id that occurs twice."""

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
        for tenant in tenants:
            if tenant.id in self._accounts:
                other = self._accounts[tenant.id].tenant
                raise ConfigError(
                    f"tenants {other.name!r} and {tenant.name!r} share id {tenant.id}"
                )
            self.put(tenant)

    def __getitem__(self, id: int) -> Tenant:
        """The tenant. Raises RequestError when no tenant has this id."""
        return self._account(id).tenant

    def __iter__(self) -> Iterator[Tenant]:
        return (account.tenant for account in self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, id: int) -> bool:
        return id in self._accounts

    def put(self, *tenants: Tenant) -> None:
        """Add tenants or change them, all at once and in force from the next decision on. Nothing
        is taken back where a quota is lowered. Raises ConfigError when one is not valid."""
        for tenant in tenants:
            tenant.validate()
        known = [tenant for tenant in tenants if tenant.id in self]
        self._leave({one.id for one in known if scope_of(self[one.id]) != scope_of(one)})
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
        """Each scope that a tenant shares, and a number that no earlier one like it had."""
        born, numbers = self._born, self._numbers
        return {scope: born.setdefault(scope, next(numbers)) for scope in map(scope_of, self)}

    def members(self, scope: Scope) -> list[str | int]:
        """The ids and names of those who share a scope, by id."""
        own = sorted((one.id, one.name) for one in self if scope_of(one) == scope)
        return [part for member in own for part in member]

    def _leave(self, ids: Collection[int]) -> None:
        """End the scopes in which nobody is left when these tenants leave theirs. Whoever repeats
        an interrupted change ends them again."""
        left = {scope_of(self[id]) for id in ids}
        if any(kind == "group" for kind, *_ in left):
            left -= {scope_of(tenant) for tenant in self if tenant.id not in ids}
        for scope in left:
            self._forget(scope)
            self._born.pop(scope, None)

    def begin_removal(self, id: int) -> None:
        """Refuse new requests of a tenant. It is removed when its last request has ended. Raises
        RequestError when no tenant has this id."""
        self._account(id)
        self._removed.add(id)
        self.changes += 1

    def is_removed(self, id: int) -> bool:
        """Whether the tenant was removed and still has requests."""
        return id in self._removed

    def finish_removals(self) -> None:
        """Forget the removed tenants that have no requests left.

        An engine that was interrupted while it ended a request holds its slot and pages until it
        recovers, so its tenant is forgotten then."""
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
        self._leave({id})
        self.changes += 1
        del self._accounts[id]

    @property
    def reservations(self) -> dict[int, int]:
        """Pages reserved by each tenant that was not removed and reserves any."""
        return {
            tenant.id: tenant.reserved_pages
            for tenant in self
            if tenant.reserved_pages and tenant.id not in self._removed
        }

    def class_of(self, request: Request) -> QosClass:
        """The class a request is served in."""
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
        """Change what the tenant holds by signed amounts. The slots are those of requests that ask
        for class ``qos``. A request that gives back a slot without progress was not ``served``."""
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
            self.hold_pages(id, account.pages.get(holder, 0) + pages, holder)
        if live:
            account.live[holder] = account.live.get(holder, 0) + live
            assert account.live[holder] >= 0, f"tenant {id} gave back twice"

    def hold_pages(self, id: int, pages: int, holder: Hashable = None) -> None:
        """Set how many of a holder's pages are charged to the tenant."""
        assert pages >= 0, f"tenant {id} gave back twice"
        self._account(id).pages[holder] = pages

    def let_go(self, holder: Hashable, live: Mapping[int, int]) -> None:
        """Set what a holder, an engine, has: no slots, no pages, and so many ``live`` requests of
        each tenant. This is true after the engine has recovered from an interrupt."""
        now = self._clock()
        for id, account in self._accounts.items():
            account.recent = account.recent_at(now)
            own = {holder: live[id]} if live.get(id) else {}
            # One assignment each, requests first: whatever interrupts this call, a removed tenant
            # that has requests has some here, and is not forgotten.
            account.live = {key: n for key, n in account.live.items() if key != holder} | own
            account.slots = {key: n for key, n in account.slots.items() if key[0] != holder}
            account.pages = {key: n for key, n in account.pages.items() if key != holder}
            account.decoded.recount()
            account.prefilled.recount()

    def count(self, id: int, prefilled: int, decoded: int) -> None:
        """Count tokens that are computed now towards the tenant's rates."""
        self.counter(id)(prefilled, decoded)

    def counter(self, id: int) -> Callable[[int, int], None]:
        """A function that counts tokens for the present tenant, also when it is called after
        another tenant got its id."""
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
        """When the tenant's requests that ask for class ``qos`` last gave back a slot in which they
        made progress, -inf if they never did; None while they have a slot."""
        account = self._account(id)
        if any(held for (_, asked), held in account.slots.items() if asked is qos):
            return None
        return account.served.get(qos, -math.inf)

    def idle_since(self, id: int) -> float | None:
        """The same for all requests of the tenant, whatever class they ask for."""
        account = self._account(id)
        if account.slots_held:
            return None
        return max(account.served.values(), default=-math.inf)

    def within_quota(self, id: int, pages: int) -> bool:
        """Whether a request of so many ``pages`` may be admitted: one more slot and the pages are
        within the quotas, and both rates are below theirs.

        The only running request of a tenant may have the pages it needs: it was checked when it was
        submitted, and a quota lowered since then must not make it wait for ever."""
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
        """Seconds until both rates of the tenant are below their quotas, if nothing more is
        computed for it; 0 if they are."""
        account, now = self._account(id), self._clock()
        tenant = account.tenant
        return max(
            account.decoded.below_in(now, tenant.decode_tokens_per_s),
            account.prefilled.below_in(now, tenant.prefill_tokens_per_s),
        )

    def dominant_share(self, id: int) -> float:
        """The largest part of a quota that the tenant uses, of slots and pages, divided by its
        weight (weighted dominant resource fairness, Ghodsi et al. 2011).

        Slots are whole, so what is left over when they are divided goes round: a tenant that held
        more slots recently than it holds now counts as holding up to PART_OF_A_SLOT more."""
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
