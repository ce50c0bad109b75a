"""The calls of an engine that add, change and remove tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from contract.types import Tenant
from reference.engine.tenant_changes import TenantChanges
from reference.usage import UsageCounters


class TenantCalls:
    """A base class of ``Engine`` for its calls about tenants. ``_change`` is a context in which a
    change is made whole, or repaired after an error. ``_repair`` repairs what an interrupt left:
    until then a removed tenant may seem to have slots."""

    usage: UsageCounters
    _changes: TenantChanges
    _change: Callable[[], AbstractContextManager[None]]
    _repair: Callable[[], None]

    def put_tenant(self, tenant: Tenant) -> None:
        """Add a tenant or change one, in force from the next decision on. Requests that are left of
        a removed tenant with the same id end with an error. Raises ConfigError when it is not
        valid, and ValueError when more pages are reserved than there are; nothing is changed
        then."""
        self._repair()
        self._changes.check([tenant])
        self._change_whole(lambda: self._changes.put(tenant))

    def check_tenants(self, tenants: Iterable[Tenant], *, whole: bool = False) -> None:
        """Raise what ``put_tenant`` would raise for any of these, or, with ``whole``, what
        ``replace_tenants`` would raise for all of them."""
        self._changes.check(tenants, whole=whole)

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Make these the only tenants, in one change: all others are removed. Raises as
        ``put_tenant`` does, having changed nothing."""
        self._repair()
        tenants = tuple(tenants)
        self._changes.check(tenants, whole=True)
        self._change_whole(lambda: self._changes.replace(tenants))

    def remove_tenant(self, id: int) -> None:
        """Remove a tenant and its cached pages: at once, or when the last of its requests has
        ended. Its reserved pages are free for all, and new requests of it are refused. Raises
        RequestError when no tenant has this id."""
        self.begin_removal(id)
        self.finish_removals()

    def begin_removal(self, id: int) -> None:
        """The first half of ``remove_tenant``: refuse new requests of the tenant. Where several
        engines share tenants, each does this half before any does the other."""
        self._changes.begin_removal(id)

    def finish_removals(self) -> None:
        """The second half of ``remove_tenant``: forget the removed tenants that have no requests
        left, and their cached pages."""
        self._change_whole(self._changes.follow)

    def end_removed(self, id: int) -> None:
        """End the requests that are left of a removed tenant, with an error: another tenant gets
        its id."""
        self._repair()
        self._change_whole(lambda: self._changes.end_removed(id))

    def _change_whole(self, change: Callable[[], None]) -> None:
        """Change the tenants, also where the device fails: after the failure no sequence runs, so
        the second try needs no device. The error is raised all the same."""
        try:
            with self._change():
                change()
        except Exception:
            with self._change():
                change()
            raise
