"""The tenants of a server, from a TOML file:

    [tenant.alice]
    id = 1
    qos = "interactive"
    max_slots = 8
    keys = ["sha256:..."]

The keys of a table are the fields of ``contract.types.Tenant``, of which only ``id`` has no
default, and four for the server: ``keys``, the digests of the tenant's API keys; ``models``, the
names of the only models it may use, all models where there are none; ``operator``, the right to see
every tenant's usage; ``admin``, the right to change models and tenants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.types import QosClass, Tenant
from harness.toml_file import read_toml, unknown_key

SECTION = "tenant"
KEY_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant, the digests of its API keys, the only models it may use (all if empty), and its
    rights to see all tenants and to change them. Every admin is an operator."""

    tenant: Tenant
    keys: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    operator: bool = False
    admin: bool = False


RIGHTS = ("operator", "admin")
OF_TENANT = tuple(field.name for field in fields(Tenant) if field.name != "name")
KEYS = (*OF_TENANT, "keys", "models", *RIGHTS)


def account_facts(account: Account) -> dict[str, Any]:
    """An account as JSON values, with the number of its keys instead of their digests."""
    facts = asdict(account.tenant) | {
        "qos": account.tenant.qos.value,
        "keys": len(account.keys),
        "models": list(account.models),
    }
    return facts | {right: getattr(account, right) for right in RIGHTS}


def named_account(accounts: Iterable[Account], name: str) -> Account | None:
    """The account with this name, or else with this id; None if there is none."""
    known = {str(account.tenant.id): account for account in accounts}
    known |= {account.tenant.name: account for account in known.values()}
    return known.get(name)


def read_accounts(path: Path) -> tuple[Account, ...]:
    """The accounts the file declares, by id. Raises ConfigError naming the file, the tenant and the
    field of the first error."""
    return accounts_of(read_toml(path, "file of tenants"), path)


def accounts_of(sections: Mapping[str, Any], path: Path) -> tuple[Account, ...]:
    """The accounts that the file's tables declare; see ``read_accounts``."""
    for key in sections:
        if key != SECTION:
            raise ConfigError(
                f"{path}: unknown section {key!r}; tenants are sections [{SECTION}.NAME]"
            )
    declared = sections.get(SECTION)
    if not isinstance(declared, dict) or not declared:
        raise ConfigError(f"{path}: declares no tenant; write a section [{SECTION}.NAME]")
    names: dict[int, str] = {}
    accounts = [_account(path, name, values) for name, values in declared.items()]
    owners: dict[str, str] = {}
    for account in accounts:
        tenant = account.tenant
        for key in account.keys:
            if owners.setdefault(key, tenant.name) != tenant.name:
                raise ConfigError(
                    f"{path}: tenants {owners[key]!r} and {tenant.name!r} share a key; "
                    "give each its own"
                )
        if tenant.id in names:
            raise ConfigError(
                f"{path}: tenant {tenant.name!r}: id {tenant.id} is that of "
                f"{names[tenant.id]!r}; give each its own"
            )
        names[tenant.id] = tenant.name
    return tuple(sorted(accounts, key=lambda account: account.tenant.id))


def _account(path: Path, name: str, values: Any) -> Account:
    where = f"{path}: tenant {name!r}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: is {values!r}; write a section [{SECTION}.{name}]")
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{where}: {unknown_key(key, KEYS)}")
    if "id" not in values:
        raise ConfigError(f"{where}: id is missing; give it a number of its own")
    if "qos" in values:
        try:
            values = {**values, "qos": QosClass(values["qos"])}
        except ValueError:
            accepted = ", ".join(repr(qos.value) for qos in QosClass)
            raise ConfigError(f"{where}: qos is {values['qos']!r}, not one of {accepted}") from None
    values = dict(values)
    keys, rights = values.pop("keys", []), {name: values.pop(name, False) for name in RIGHTS}
    if not isinstance(keys, list) or not all(
        isinstance(key, str) and KEY_DIGEST.fullmatch(key) for key in keys
    ):
        raise ConfigError(
            f"{where}: keys is not a list of digests; `zinc-rt tenants key` makes a key "
            'and prints the line keys = ["sha256:..."]'
        )
    models = values.pop("models", [])
    if not isinstance(models, list) or not all(type(name) is str and name for name in models):
        raise ConfigError(
            f'{where}: models is not a list of names of models, such as ["qwen3-0.6b"]'
        )
    for which, right in rights.items():
        if type(right) is not bool:
            raise ConfigError(f"{where}: {which} is {right!r}, not true or false")
    tenant = Tenant(name=name, **values)
    try:
        tenant.validate()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    operator, admin = rights.values()
    return Account(tenant, tuple(keys), tuple(models), operator or admin, admin)
