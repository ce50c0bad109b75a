"""The routes about tenants: who they are, and for admins adding, new keys and removing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from flask import Response, g
from msgspec import Meta, Struct

from contract.errors import ConfigError
from contract.types import MAX_INT32, MAX_UINT32
from harness.serve.accounts import Accounts
from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.gate import need_admin
from harness.serve.openapi import Route
from harness.serve.server_models import ServerModels
from harness.serve.wire import decode
from harness.tenants import Account, account_facts
from harness.tenants_file import add_tenant, remove_tenant, rotate_key

Number = Annotated[int, Meta(ge=0, le=MAX_UINT32)]
Quota = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Pages = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Weight = Annotated[float, Meta(gt=0)]


class AddTenant(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """``POST /v1/tenants``. Omitted fields have the defaults of docs/scheduling.md. Without ``id``
    the server chooses one."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    id: Number | None = None
    qos: Literal["interactive", "standard", "batch"] | None = None
    weight: Weight | None = None
    max_slots: Quota | None = None
    max_kv_pages: Quota | None = None
    isolation_group: Number | None = None
    decode_tokens_per_s: Quota | None = None
    prefill_tokens_per_s: Quota | None = None
    max_context: Quota | None = None
    max_waiting: Quota | None = None
    reserved_pages: Pages | None = None
    models: list[Annotated[str, Meta(min_length=1)]] = []
    operator: bool = False
    admin: bool = False


class RotateKey(Struct, forbid_unknown_fields=True):
    """``POST /v1/tenants/ID/rotate``. With ``keep_old`` the latest key stays valid until the next
    change."""

    keep_old: bool = False


TENANT_ROUTES = (
    Route("GET", "/v1/tenants", "tenants", "All tenants. For operators."),
    Route(
        "POST", "/v1/tenants", "add_tenant", "Add one; its key. For admins.",
        AddTenant, strict=True,
    ),
    Route("GET", "/v1/tenants/<tenant>", "tenant", "One of them: one's own, or for operators."),
    Route("DELETE", "/v1/tenants/<tenant>", "remove_tenant", "Remove one. For admins."),
    Route(
        "POST", "/v1/tenants/<tenant>/rotate", "rotate_key", "A new key. For admins.",
        RotateKey, strict=True,
    ),
    Route("GET", "/v1/tenants/<tenant>/usage", "usage", "What a tenant was given."),
)  # fmt: skip


class TenantHandlers:
    """A method for each route of TENANT_ROUTES, by its name."""

    def __init__(self, models: ServerModels) -> None:
        self._models = models
        self._accounts: Accounts = models.accounts

    def tenants(self) -> Json:
        if not g.account.operator:
            raise ApiError(403, "this tells of all tenants; ask with an operator's key")
        return {"object": "list", "data": [account_facts(each) for each in self._accounts.all]}

    def tenant(self, tenant: str) -> Json:
        return account_facts(self._visible(tenant))

    def usage(self, tenant: str) -> Json:
        usage: Json = g.service.usage(self._visible(tenant))
        return usage

    def add_tenant(self, raw: bytes) -> Response:
        need_admin()
        body = decode(raw, AddTenant)
        values = msgspec.to_builtins(body)
        name = values.pop("name")
        counted = max(g.service.ledger.tenants(), default=0)
        with _refusals(self._path) as path:
            key = add_tenant(path, name, values, counted + 1, self._check)
        return self._changed(name, key)

    def rotate_key(self, raw: bytes, tenant: str) -> Response:
        need_admin()
        body = decode(raw, RotateKey)
        with _refusals(self._path) as path:
            name = self._account_named(tenant).tenant.name
            key = rotate_key(path, name, keep_old=body.keep_old)
        return self._changed(name, key)

    def remove_tenant(self, tenant: str) -> Json:
        need_admin()
        with _refusals(self._path) as path:
            account = self._account_named(tenant)
            if account.tenant.id == g.account.tenant.id:
                raise ApiError(400, "an admin cannot remove itself", param="tenant")
            remove_tenant(path, account.tenant.name)
        self._reload()
        return {"id": account.tenant.id, "name": account.tenant.name, "deleted": True}

    @property
    def _path(self) -> Path:
        path = self._accounts.path
        if path is None:
            raise ApiError(
                400,
                "this server has no file of tenants; start it with --tenants FILE",
                code="no_tenants_file",
            )
        return path

    def _check(self, accounts: Sequence[Account]) -> None:
        pages = g.service.model.limits.pages
        reserved = sum(account.tenant.reserved_pages for account in accounts)
        if reserved > pages:
            raise ConfigError(f"{reserved} pages would be reserved, there are {pages}")

    def _account_named(self, name: str) -> Account:
        account = self._accounts.named(name)
        if account is None:
            raise _no_such_tenant()
        return account

    def _visible(self, name: str) -> Account:
        """A tenant that the caller may see. Raises ApiError 404."""
        account = self._account_named(name)
        if not (g.account.operator or account.tenant.id == g.account.tenant.id):
            raise _no_such_tenant()
        return account

    def _changed(self, name: str, key: str) -> Response:
        """The answer with the tenant and its new key; proxies must not store it."""
        self._reload()
        facts = account_facts(self._account_named(name))
        return Response(
            msgspec.json.encode({"tenant": facts, "key": key}),
            mimetype="application/json",
            headers={"Cache-Control": "no-store"},
        )

    def _reload(self) -> None:
        self._accounts.reload(self._models.change_tenants)


def _no_such_tenant() -> ApiError:
    return ApiError(404, "there is no such tenant, or it is another's", param="tenant")


@contextmanager
def _refusals(path: Path) -> Iterator[Path]:
    """Turn ConfigError into ApiError, without the path of the file."""
    try:
        yield path
    except ConfigError as error:
        problem = str(error).replace(f"{path.resolve()}: ", "")
        raise ApiError(400, problem, code="tenants_refused") from None
