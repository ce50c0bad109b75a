"""Numbers of the scopes in which prefixes are shared. A scope that ended and exists again gets a
new number."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from contract.types import Tenant
from reference.sched.tenants import Tenants

Scope = tuple[str, int]


class Shared(NamedTuple):
    """The ``number`` of a scope, and the ids of its ``members``."""

    number: int
    members: set[int]


class Scopes:
    """The scope of each of ``tenants``: pages written in a scope may be read in this scope only. A
    scope ends where none of its members is one after a change. ``before`` are those of the process
    before this one, whose pages may be on disk."""

    def __init__(self, tenants: Tenants, before: Scopes | None = None) -> None:
        self._tenants = tenants
        self._shared: dict[Scope, Shared] = {} if before is None else before._shared
        self._next: int = 0 if before is None else before._next
        self.refresh()

    def number_of(self, tenant: int) -> int:
        """The number of a tenant's present scope."""
        self.refresh()
        return self._shared[_scope(self._tenants[tenant])].number

    def refresh(self, ended: Collection[int] = ()) -> None:
        """Number the present scopes. Tenants that ``ended`` are members no more, since other
        tenants have their ids now."""
        before, members = self._shared, dict[Scope, set[int]]()
        for tenant in self._tenants:
            members.setdefault(_scope(tenant), set()).add(tenant.id)
        self._shared = {}
        for scope, now in members.items():
            known = before.get(scope)
            if known is None or not (known.members & now) - set(ended):
                known, self._next = Shared(self._next, now), self._next + 1
            self._shared[scope] = Shared(known.number, now)


def _scope(tenant: Tenant) -> Scope:
    group = tenant.isolation_group
    return ("tenant", tenant.id) if group is None else ("group", group)
