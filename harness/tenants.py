"""The tenants of a server, from a TOML file:

    [tenant.alice]
    id = 1
    qos = "interactive"
    max_slots = 8

Keys are the fields of ``contract.types.Tenant``; all but ``id`` have its defaults.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.types import QosClass, Tenant
from harness.toml_file import read_toml, unknown_key

KEYS = tuple(field.name for field in fields(Tenant) if field.name != "name")
SECTION = "tenant"


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """The tenants the file declares, by id. Raises ConfigError, naming the file, the tenant and
    the field, for the first thing in it that is wrong."""
    sections = read_toml(path, "file of tenants")
    for key in sections:
        if key != SECTION:
            raise ConfigError(
                f"{path}: unknown section {key!r}; tenants are sections [{SECTION}.NAME]"
            )
    declared = sections.get(SECTION)
    if not isinstance(declared, dict) or not declared:
        raise ConfigError(f"{path}: declares no tenant; write a section [{SECTION}.NAME]")
    names: dict[int, str] = {}
    tenants = [_tenant(path, name, values) for name, values in declared.items()]
    for tenant in tenants:
        if tenant.id in names:
            raise ConfigError(
                f"{path}: tenant {tenant.name!r}: id {tenant.id} is that of "
                f"{names[tenant.id]!r}; give each its own"
            )
        names[tenant.id] = tenant.name
    return tuple(sorted(tenants, key=lambda tenant: tenant.id))


def _tenant(path: Path, name: str, values: Any) -> Tenant:
    place = f"{path}: tenant {name!r}"
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: is {values!r}; write a section [{SECTION}.{name}]")
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{place}: {unknown_key(key, KEYS)}")
    if "id" not in values:
        raise ConfigError(f"{place}: id is missing; give it a number of its own")
    if "qos" in values:
        try:
            values = {**values, "qos": QosClass(values["qos"])}
        except ValueError:
            accepted = ", ".join(repr(qos.value) for qos in QosClass)
            raise ConfigError(f"{place}: qos is {values['qos']!r}, not one of {accepted}") from None
    tenant = Tenant(name=name, **values)
    try:
        tenant.validate()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return tenant
