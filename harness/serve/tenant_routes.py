"""The routes about tenants: who they are, and for admins adding, new keys and removing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from contract.errors import ConfigError
from contract.types import MAX_INT32, MAX_UINT32
from harness import tenants_file
from harness.serve.accounts import Accounts
from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.http_answer import HttpAnswer
from harness.serve.http_request import HttpRequest
from harness.serve.route import Route
from harness.tenants import Account, account_facts

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


def tenants(incoming: HttpRequest) -> Json:
    """All tenants. Raises ApiError 403."""
    if not incoming.account.operator:
        raise ApiError(403, "this tells of all tenants; ask with an operator's key")
    return {"object": "list", "data": list(map(account_facts, _accounts(incoming).all))}


def tenant(incoming: HttpRequest, tenant: str) -> Json:
    """A tenant that the caller may see."""
    return account_facts(_visible(incoming, tenant))


def usage(incoming: HttpRequest, tenant: str) -> Json:
    """The usage of a tenant that the caller may see."""
    return incoming.service.usage(_visible(incoming, tenant))


def add_tenant(incoming: HttpRequest, body: AddTenant) -> HttpAnswer:
    """Add a tenant. Raises ApiError."""
    values = msgspec.to_builtins(body)
    name, counted = values.pop("name"), max(incoming.service.ledger.tenants(), default=0)
    pages = incoming.model.limits.pages

    def check(accounts: Sequence[Account]) -> None:
        reserved = sum(account.tenant.reserved_pages for account in accounts)
        if reserved > pages:
            raise ConfigError(f"{reserved} pages would be reserved, there are {pages}")

    with _tenants_file(incoming) as path:
        key = tenants_file.add_tenant(path, name, values, counted + 1, check)
    return _changed(incoming, name, key)


def rotate_key(incoming: HttpRequest, body: RotateKey, tenant: str) -> HttpAnswer:
    """Give a tenant a new key. Raises ApiError."""
    with _tenants_file(incoming) as path:
        name = _account_named(incoming, tenant).tenant.name
        key = tenants_file.rotate_key(path, name, keep_old=body.keep_old)
    return _changed(incoming, name, key)


def remove_tenant(incoming: HttpRequest, tenant: str) -> Json:
    """Remove a tenant. Raises ApiError."""
    with _tenants_file(incoming) as path:
        removed = _account_named(incoming, tenant).tenant
        if removed.id == incoming.account.tenant.id:
            raise ApiError(400, "an admin cannot remove itself", param="tenant")
        tenants_file.remove_tenant(path, removed.name)
    _reload(incoming)
    return {"id": removed.id, "name": removed.name, "deleted": True}


def _accounts(incoming: HttpRequest) -> Accounts:
    return incoming.server.models.accounts


def _account_named(incoming: HttpRequest, name: str) -> Account:
    account = _accounts(incoming).named(name)
    if account is None:
        raise _no_such_tenant()
    return account


def _visible(incoming: HttpRequest, name: str) -> Account:
    """A tenant that the caller may see. Raises ApiError 404."""
    account, own = _account_named(incoming, name), incoming.account
    if not (own.operator or account.tenant.id == own.tenant.id):
        raise _no_such_tenant()
    return account


def _changed(incoming: HttpRequest, name: str, key: str) -> HttpAnswer:
    """The answer with the tenant and its new key; proxies must not store it."""
    _reload(incoming)
    facts = account_facts(_account_named(incoming, name))
    encoded = msgspec.json.encode({"tenant": facts, "key": key})
    return HttpAnswer(encoded, headers={"Cache-Control": "no-store"})


def _reload(incoming: HttpRequest) -> None:
    _accounts(incoming).reload(incoming.server.models.change_tenants)


def _no_such_tenant() -> ApiError:
    return ApiError(404, "there is no such tenant, or it is another's", param="tenant")


@contextmanager
def _tenants_file(incoming: HttpRequest) -> Iterator[Path]:
    """The file of tenants. In the block, ConfigError becomes ApiError without the path of the file.
    Raises ApiError for a server without such a file."""
    path = _accounts(incoming).path
    if path is None:
        problem = "this server has no file of tenants; start it with --tenants FILE"
        raise ApiError(400, problem, code="no_tenants_file")
    try:
        yield path
    except ConfigError as error:
        problem = str(error).replace(f"{path.resolve()}: ", "")
        raise ApiError(400, problem, code="tenants_refused") from None


_route = partial(Route, strict=True, admin=True)
TENANT_ROUTES = (
    Route("GET", "/v1/tenants", tenants, "All tenants. For operators."),
    _route("POST", "/v1/tenants", add_tenant, "Add one; its key. For admins.", AddTenant),
    Route("GET", "/v1/tenants/<tenant>", tenant, "One of them: one's own, or for operators."),
    _route("DELETE", "/v1/tenants/<tenant>", remove_tenant, "Remove one. For admins."),
    _route(
        "POST", "/v1/tenants/<tenant>/rotate", rotate_key, "A new key. For admins.", RotateKey
    ),
    Route("GET", "/v1/tenants/<tenant>/usage", usage, "What a tenant was given."),
)  # fmt: skip
