"""Numbers of the scopes in which prefixes are shared. A scope that ended and exists again gets a
new number."""

from __future__ import annotations

from collections.abc import Collection

from contract.types import Tenant
from reference.sched.tenants import Tenants

Scope = tuple[str, int]


class Scopes:
    """The scope of each of ``tenants``: pages written in a scope may be read in this scope only. A
    scope ends with the last tenant that belongs to it. ``before`` are those of the process before
    this one, whose pages may be on disk."""

    def __init__(self, tenants: Tenants, before: Scopes | None = None) -> None:
        self._tenants = tenants
        self._numbers: dict[Scope, int] = {}
        self._before = {} if before is None else before._named()
        self._next: int = 0 if before is None else before._next
        self.refresh()

    def number_of(self, tenant: int) -> int:
        """The number of a tenant's present scope."""
        self.refresh()
        return self._numbers[_scope(self._tenants[tenant])]

    def refresh(self, ended: Collection[int] = ()) -> None:
        """Number the present scopes. The own scopes of tenants that ``ended`` get new numbers,
        since other tenants have their ids now."""
        alive = {_scope(tenant) for tenant in self._tenants}
        for scope in self._numbers.keys() - alive | {("tenant", id) for id in ended}:
            self._numbers.pop(scope, None)
        for scope in sorted(alive - self._numbers.keys()):
            self._numbers[scope] = self._before.pop(self._name(scope), self._next)
            self._next += 1

    def _named(self) -> dict[tuple[Scope, str], int]:
        return self._before | {self._name(one): number for one, number in self._numbers.items()}

    def _name(self, scope: Scope) -> tuple[Scope, str]:
        """A scope as its pages on disk have it: with the name of the tenant whose own it is."""
        kind, id = scope
        own = kind == "tenant" and id in self._tenants
        return scope, self._tenants[id].name if own else ""


def _scope(tenant: Tenant) -> Scope:
    group = tenant.isolation_group
    return ("tenant", tenant.id) if group is None else ("group", group)
