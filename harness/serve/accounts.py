"""The tenants of a server. Their file is read again when it changes."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from contract.errors import ConfigError, ZincError, system_errors_as
from contract.types import LOCAL_TENANT, Tenant
from harness.host.faults import log_fault
from harness.host.submissions import EngineStopped
from harness.serve.errors import ApiError
from harness.serve.keys import Keyring, presented_key
from harness.tenants import Account, named_account, read_accounts
from reference.engine import Engine
from reference.sched.tenants import Usage
from reference.usage import TenantStatistics

POLL_SECONDS = 1.0
"""Fewest seconds between two checks of the file."""
LOCAL = Account(LOCAL_TENANT, operator=True, admin=True)
log = logging.getLogger("zinc_rt.serve")


class HasTenants(Protocol):
    """An object with tenants: one engine, or all engines of a server."""

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """See ``Engine``."""


OnChange = Callable[[Collection[int]], None]
CallEngine = Callable[[Callable[[HasTenants], None]], None]
"""Calls a function with the engine between two steps."""


@dataclass(frozen=True, slots=True)
class _TenantsFile:
    """The contents of the file that were read last."""

    accounts: dict[int, Account]
    keyring: Keyring
    digest: bytes


class Accounts:
    """The accounts of a server: those of ``path``, or one local tenant without a key. Raises
    ConfigError for a file that cannot be used, or in which nobody has a key."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self.on_change: list[OnChange] = []
        """Called with the ids of all tenants after they changed. One that fails is called again."""
        self._untold: list[OnChange] = []
        self._file = (
            _TenantsFile({LOCAL_TENANT.id: LOCAL}, Keyring(), b"") if path is None else _read(path)
        )

    @property
    def path(self) -> Path | None:
        """The file, if there is one."""
        return self._path

    @property
    def keyed(self) -> bool:
        """Whether a request needs a key."""
        return self._path is not None

    @property
    def tenants(self) -> Sequence[Tenant]:
        """All tenants."""
        return [account.tenant for account in self.all]

    def of(self, authorization: str | None, api_key: str | None = None) -> Account:
        """The account of a key: from an ``Authorization`` header, or else ``api_key`` from a header
        of its own. Raises ApiError 401."""
        file = self._file
        if not self.keyed:
            return LOCAL
        key = presented_key(authorization or (api_key and f"Bearer {api_key}"))
        tenant = None if key is None else file.keyring.tenant_of(key)
        if tenant is None:
            problem = "an API key is needed" if key is None else "this API key is not known"
            raise ApiError(
                401,
                f"{problem}; send the header Authorization: Bearer KEY, or X-Api-Key: KEY",
                code="invalid_api_key",
            )
        return file.accounts[tenant]

    def named(self, name: str) -> Account | None:
        """The account with an id or a name."""
        return named_account(self.all, name)

    @property
    def all(self) -> Sequence[Account]:
        """All accounts."""
        return list(self._file.accounts.values())

    def refresh(self, call: CallEngine) -> None:
        """Read the file again if it changed, at most once in POLL_SECONDS, and change the engine.

        A file that cannot be used changes nothing and is reported in the log."""
        if self._path is None or not self._lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._looked < POLL_SECONDS:
                return
            self._looked = time.monotonic()
            self._reload(self._path, call)
        finally:
            self._lock.release()

    def reload(self, call: CallEngine) -> None:
        """Read the file again now, and change the engine if the file changed."""
        if self._path is not None:
            with self._lock:
                self._reload(self._path, call)

    def send_to(self, call: CallEngine) -> None:
        """Replace the tenants of an engine by the current ones."""
        with self._lock:
            call(_replacing(self._file.accounts))

    def _reload(self, path: Path, call: CallEngine) -> None:
        try:
            if _digest(path) == self._file.digest:
                self._tell(self._untold)
                return
            fresh = _read(path)
            call(_replacing(fresh.accounts))
        except (ConfigError, ValueError) as error:
            log.error("the tenants stay as they were: %s", error)
            return
        except EngineStopped:
            # It may have changed, or may later. Whatever the file says is sent again.
            self._file = replace(self._file, digest=b"")
            raise
        self._file = fresh
        self._tell(self.on_change)
        log.info("%d tenants, %d keys read from %s", len(fresh.accounts), len(fresh.keyring), path)

    def _tell(self, listeners: Sequence[OnChange]) -> None:
        """Call all ``listeners`` and remember those that fail; only a new failure is logged."""
        failed = []
        for changed in listeners:
            try:
                changed(self._file.accounts.keys())
            except Exception as error:
                failed.append(changed)
                if changed in self._untold:
                    continue
                if isinstance(error, ZincError):
                    log.error("tenants changed, and not all is done about it yet: %s", error)
                else:
                    log_fault("tenants changed, and not all is done about it yet", error)
        self._untold = failed


def _read(path: Path) -> _TenantsFile:
    digest = _digest(path)
    accounts = read_accounts(path)
    keyring = Keyring((key, account.tenant.id) for account in accounts for key in account.keys)
    if not len(keyring):
        raise ConfigError(
            f"{path}: no tenant has a key, so nobody could be served; `zinc-rt tenants key` makes "
            "one"
        )
    return _TenantsFile({account.tenant.id: account for account in accounts}, keyring, digest)


def _digest(path: Path) -> bytes:
    with system_errors_as(f"{path}: cannot read"):
        return hashlib.sha256(path.read_bytes()).digest()


def usage_in(engine: Engine, tenant: int) -> tuple[TenantStatistics, Usage]:
    """What an engine has counted for a tenant, and what the tenant uses now."""
    return engine.usage.of(tenant), engine.tenants.usage(tenant)


def _replacing(accounts: Mapping[int, Account]) -> Callable[[HasTenants], None]:
    """A function that replaces an engine's tenants by those of these accounts, all or none. A
    removed tenant stays until its requests have ended; without a key it cannot send new ones."""
    return partial(_replace_tenants, tenants=[account.tenant for account in accounts.values()])


def _replace_tenants(engine: HasTenants, tenants: Sequence[Tenant]) -> None:
    engine.replace_tenants(tenants)
