"""What an engine offers to whoever manages its tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from contract.types import Tenant
from reference.engine.tenant_changes import TenantChanges
from reference.ledger import Ledger


class TenantCalls:
    """The calls of an engine that add, change and remove tenants. ``_change`` makes what is done in
    it whole, or good after an error."""

    ledger: Ledger
    _changes: TenantChanges
    _change: Callable[[], AbstractContextManager[None]]

    def put_tenant(self, tenant: Tenant) -> None:
        """Add a tenant or change one, in force from the next decision on. Where an earlier one of
        the same id was removed and has requests left, they end with an error.

        Raises ConfigError when it is not valid, and ValueError when more pages are reserved than
        there are; nothing is changed then.
        """
        self._changes.check([tenant])
        self._change_whole(lambda: self._changes.put(tenant))

    def check_tenants(self, tenants: Iterable[Tenant], *, whole: bool = False) -> None:
        """Raise what ``put_tenant`` would for any of these, or ``replace_tenants`` for the
        ``whole`` of them."""
        self._changes.check(tenants, whole=whole)

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Let these be the tenants, all at once: others are removed. Raises as ``put_tenant`` does,
        and nothing is changed then."""
        tenants = tuple(tenants)
        self._changes.check(tenants, whole=True)
        self._change_whole(lambda: self._changes.replace(tenants))

    def remove_tenant(self, id: int) -> None:
        """Forget a tenant and what it computed: at once, or when the last of its requests ended.
        What it had reserved is everybody's again, and new requests of it are refused.

        Raises RequestError when there is none with this id.
        """
        self.let_leave(id)
        self.forget_left()

    def let_leave(self, id: int) -> None:
        """The first half of ``remove_tenant``, for each of several engines that share tenants
        before the other half of any: new requests of the tenant are refused."""
        self._changes.begin_removal(id)

    def forget_left(self) -> None:
        """Forget the removed tenants of whose requests none is left, and what they computed."""
        self._change_whole(self._changes.follow)

    def end_removed(self, id: int) -> None:
        """End the requests that are left of a removed tenant, with an error: its id is another's
        now."""
        self._change_whole(lambda: self._changes.end_removed(id))

    def take_back(self, tenant: int, tokens: int) -> None:
        """Count so many tokens that were handed out for nobody: they are behind the end of their
        answer, a stop string that the engine knows nothing of."""
        if tenant in self.ledger.tenants:
            self.ledger.generated(tenant, -tokens)

    def _change_whole(self, change: Callable[[], None]) -> None:
        """Change the tenants. Where the device fails meanwhile nobody is placed any more, so the
        rest of the change needs none; the error comes back all the same."""
        try:
            with self._change():
                change()
        except Exception:
            with self._change():
                change()
            raise
