"""The engine's calls that add, change and remove tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from contract.types import Tenant
from reference.engine.tenant_changes import TenantChanges
from reference.sched.tenants import Tenants
from reference.usage import UsageCounters


class TenantCalls:
    """A base class of ``Engine`` for calls about tenants. ``_change`` is a context whose change is
    made completely or undone. ``_repair`` first removes what an interrupted call left: until then a
    removed tenant may seem to have slots."""

    usage: UsageCounters
    tenants: Tenants
    _changes: TenantChanges
    _change: Callable[[], AbstractContextManager[None]]
    _repair: Callable[[], None]

    def put_tenant(self, tenant: Tenant) -> None:
        """Add or change a tenant, effective from the next decision on. Requests left of a removed
        tenant with the same id end with an error. Raises ConfigError if it is invalid, and
        ValueError if more pages would be reserved than there are; then nothing is changed."""
        self._repair()
        self._changes.check([tenant])
        self._change_consistently(lambda: self._changes.put(tenant))

    def check_tenants(self, tenants: Iterable[Tenant], *, whole: bool = False) -> None:
        """Raise what ``put_tenant`` would raise for any of these, or, with ``whole``, what
        ``replace_tenants`` would raise."""
        self._changes.check(tenants, whole=whole)

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Replace all tenants in one change; the others are removed. Raises as ``put_tenant`` does,
        having changed nothing."""
        self._repair()
        tenants = tuple(tenants)
        self._changes.check(tenants, whole=True)
        self._change_consistently(lambda: self._changes.replace(tenants))

    def remove_tenant(self, id: int) -> None:
        """Remove a tenant and its cached pages, at once or when the last of its requests has ended.
        Its reserved pages become free, and new requests of it are refused. Raises RequestError if
        no tenant has this id."""
        self.begin_removal(id)
        self.finish_removals()

    def begin_removal(self, id: int) -> None:
        """The first half of ``remove_tenant``: refuse new requests of the tenant. If several
        engines share tenants, each does this half before any does the other. Raises RequestError
        if no tenant has this id."""
        self.tenants.begin_removal(id)

    def finish_removals(self) -> None:
        """The second half of ``remove_tenant``: forget the removed tenants without requests, and
        their cached pages."""
        if self._changes.due:
            self._change_consistently(self._changes.apply)

    def end_removed(self, id: int) -> None:
        """End the requests left of a removed tenant with an error: its id is given to another."""
        self._repair()
        self._change_consistently(lambda: self._changes.end_removed(id))

    def _change_consistently(self, change: Callable[[], None]) -> None:
        """Change the tenants even if the device fails: after the failure no sequence runs, so a
        second try needs no device. The error is still raised."""
        try:
            with self._change():
                change()
        except Exception:
            with self._change():
                change()
            raise
