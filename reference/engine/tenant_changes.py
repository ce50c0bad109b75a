"""Applies changes of the registry of tenants to an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from contract.types import FinishReason, Tenant
from reference.engine.output_processor import OutputProcessor
from reference.engine.scheduler import Scheduler
from reference.engine.sequence import Sequence
from reference.memory.prefix import Scope, scope_of
from reference.sched.tenants import Tenants, distinct
from reference.usage import UsageCounters


class TenantChanges:
    """Changes the registry of tenants, and applies every change of it, including those made by
    other engines, to one engine: reservations, scopes of shared prefixes, usage. ``live`` gives the
    engine's sequences that have not ended.

    A removed tenant stays until its last request has ended. If another tenant gets its id before
    that, its remaining requests end with an error."""

    def __init__(
        self,
        tenants: Tenants,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        usage: UsageCounters,
        live: Callable[[], Iterable[Sequence]],
    ) -> None:
        self._tenants, self._usage = tenants, usage
        self._scheduler, self._output_processor = scheduler, output_processor
        self._memory = scheduler.slot_manager.memory
        self._live = live
        self._followed = -1
        self._scopes: dict[Scope, int] = {}
        self._memory.reservations.check(tenants.reservations)
        self.apply()

    def check(self, tenants: Iterable[Tenant], *, whole: bool = False) -> None:
        """Raise ConfigError for an invalid tenant or an id that occurs twice, and ValueError if
        more pages would be reserved than there are. The tenants are added to the existing ones, or,
        with ``whole``, replace them."""
        reserved = {} if whole else self._tenants.reservations
        reserved |= {tenant.id: tenant.reserved_pages for tenant in distinct(tenants)}
        self._memory.reservations.check(reserved)

    def put(self, tenant: Tenant) -> None:
        """Add or change a tenant that passed ``check``."""
        self.end_removed(tenant.id)
        self._tenants.put(tenant)
        self.apply()

    def replace(self, tenants: Collection[Tenant]) -> None:
        """Replace all tenants by these, which passed ``check``."""
        named = {tenant.id for tenant in tenants}
        for gone in [tenant.id for tenant in self._tenants if tenant.id not in named]:
            self._tenants.begin_removal(gone)
        for tenant in tenants:
            self.end_removed(tenant.id)
        self._tenants.put(*tenants)
        self.apply()

    def end_removed(self, id: int) -> None:
        """End the remaining requests of a removed tenant with this id, and forget it."""
        if self._tenants.is_removed(id):
            for sequence in [s for s in self._live() if s.request.tenant == id]:
                self._output_processor.end_early(sequence, FinishReason.ERROR)
            self._output_processor.detach_tenants([id])
        self.apply()

    @property
    def due(self) -> bool:
        """Whether ``apply`` has anything to do."""
        return self._tenants.removing or self._followed != self._tenants.changes

    def apply(self) -> None:
        """Apply the registry to this engine, if it has changed since the last call."""
        tenants, memory = self._tenants, self._memory
        tenants.finish_removals()
        if self._followed == tenants.changes:
            return
        with suppress(ValueError):
            # Another engine may have accepted reservations for which this engine has too few pages.
            memory.reservations.set_all(tenants.reservations)
        scopes, disk = tenants.scopes, self._scheduler.slot_manager.disk
        ended = {scope for scope, born in self._scopes.items() if scopes.get(scope) != born}
        for sequence in tuple(self._live()):
            self._move_scope(sequence, ended)
        memory.forget_others(scopes.keys() - ended, {t.id for t in tenants})
        if disk is not None:
            disk.forget(ended)
        self._scopes = scopes
        gone = [id for id in self._usage.tenants if id not in tenants]
        self._output_processor.detach_tenants(gone)
        for id in gone:
            self._usage.forget(id)
        self._scheduler.check_room()
        self._followed = tenants.changes

    def _move_scope(self, sequence: Sequence, ended: Collection[Scope]) -> None:
        """If the tenant of a sequence has another scope now, let the sequence wait and be computed
        again in it: the pages it uses, or that were read for it, belong to the old scope."""
        scope = (*scope_of(self._tenants[sequence.request.tenant]), *sequence.scope[2:])
        if sequence.scope == scope and scope[:2] not in ended:
            return
        if sequence.running:
            self._scheduler.preempt(sequence, published=False)
        if (disk := self._scheduler.slot_manager.disk) is not None:
            disk.drop(sequence)
        sequence.scope = scope
