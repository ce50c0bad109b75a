"""Tenants of an engine that come, change and leave."""

from __future__ import annotations

from contract.types import Tenant
from reference.ledger import Ledger
from reference.memory.kv import KvMemory
from reference.memory.prefix import scope_of
from reference.sched.tenants import Tenants


class TenantRemoval:
    """Those that were removed while requests of them run; what they computed goes with the last."""

    def __init__(self, tenants: Tenants, memory: KvMemory, ledger: Ledger) -> None:
        self._tenants, self._memory, self._ledger = tenants, memory, ledger
        self._tenant_removal: dict[int, Tenant] = {}

    def __contains__(self, id: int) -> bool:
        return id in self._tenant_removal

    def put(self, tenant: Tenant) -> None:
        """Add a tenant or change one. Raises ConfigError when it is not valid, and ValueError when
        more pages are reserved than there are."""
        self.forget()
        self._tenants.put(tenant)
        self._memory.reserve(tenant.id, tenant.reserved_pages)
        self._tenant_removal.pop(tenant.id, None)

    def leave(self, id: int) -> None:
        """What a tenant had reserved is everybody's. Raises RequestError when there is none with
        this id."""
        tenant = self._tenants[id]
        self._memory.reserve(id, 0)
        self._tenant_removal[id] = tenant

    def forget(self) -> None:
        """Forget those of whose requests none is left, and what they computed."""
        for id, tenant in tuple(self._tenant_removal.items()):
            if id in self._tenants:
                if self._tenants.usage(id).live:
                    continue
                self._tenants.remove(id)
            del self._tenant_removal[id]
            self._ledger.forget(id)
            if tenant.isolation_group is None:
                # Who is given this id some day shall not find these.
                self._memory.forget(scope_of(tenant))

    def reserved_from(self, tenant: Tenant) -> int:
        """Pages that are kept for others than a tenant."""
        gone = {tenant.id, *self._tenant_removal}
        return sum(other.reserved_pages for other in self._tenants if other.id not in gone)
