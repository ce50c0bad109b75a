"""Changing the file of tenants: one change at a time, whole or not at all, comments kept.

The file is written anew beside its place and then takes it, so whoever reads it finds the one
before or the one after. A change that would leave a file that no server takes is refused.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomlkit
from filelock import FileLock
from tomlkit.items import Table
from tomlkit.toml_document import TOMLDocument

from contract.errors import ConfigError
from harness.serve.keys import key_digest, new_key
from harness.tenants import SECTION, Account, accounts_of, named_account
from harness.toml_file import read_text

NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
"""What a tenant may be called that is made here: fit for an address, and no number."""
LOCK_SECONDS = 30.0
Check = Callable[[Sequence[Account]], None]
"""Raises ConfigError for accounts that cannot be used, before they are written."""


def any_accounts(accounts: Sequence[Account]) -> None:
    """The check that finds nothing wrong."""


def add_tenant(
    path: Path,
    name: str,
    values: Mapping[str, Any],
    least_id: int = 1,
    check: Check = any_accounts,
) -> str:
    """Add a tenant with a new key, which is given back and kept as a digest; the file is made if it
    is not there.

    ``values`` are fields of ``contract.types.Tenant`` and rights. Without ``id`` it is one above
    all there are, at least ``least_id``: ids of tenants that were removed are not given again while
    something is counted under them. Raises ConfigError.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name[:80]!r} cannot be a tenant's name: use A-Z, a-z, 0-9, '.', '_', '-', '@', "
            "at most 64 of them, and not digits alone"
        )
    key = new_key()
    with _editing(path, check, may_be_absent=True) as (document, accounts):
        if any(account.tenant.name == name for account in accounts):
            raise ConfigError(f"{path}: there is a tenant {name!r} already")
        highest = max((account.tenant.id for account in accounts), default=0)
        table = tomlkit.table()
        table["id"] = max(highest + 1, least_id)
        table.update(values)
        table["keys"] = [key_digest(key)]
        if SECTION not in document:
            document[SECTION] = tomlkit.table(is_super_table=True)
        _sections(document)[name] = table
    return key


def rotate_key(path: Path, name: str, *, keep_old: bool = False) -> str:
    """Give a tenant a new key in place of those it has; with ``keep_old`` the latest of them stays
    good until the next change. Raises ConfigError."""
    key = new_key()
    with _editing(path) as (document, accounts):
        account = _named(path, accounts, name)
        kept = account.keys[-1:] if keep_old else ()
        _sections(document)[account.tenant.name]["keys"] = [*kept, key_digest(key)]
    return key


def remove_tenant(path: Path, name: str) -> Account:
    """Remove a tenant; gives what it was. Raises ConfigError."""
    with _editing(path) as (document, accounts):
        account = _named(path, accounts, name)
        del _sections(document)[account.tenant.name]
    return account


@contextmanager
def _editing(
    path: Path, check: Check = any_accounts, *, may_be_absent: bool = False
) -> Iterator[tuple[TOMLDocument, tuple[Account, ...]]]:
    """The file's document, to be changed, and the accounts in it. It is written at the end of the
    block."""
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS):
            text = read_text(path, "file of tenants", may_be_absent=may_be_absent)
            accounts = accounts_of(tomllib.loads(text), path) if text.strip() else ()
            document = tomlkit.parse(text)
            yield document, accounts
            changed = tomlkit.dumps(document)
            after = accounts_of(tomllib.loads(changed), path)
            if not any(account.keys for account in after):
                raise ConfigError(f"{path}: no tenant would have a key left")
            check(after)
            _replace(path, changed)
    except TimeoutError:
        raise ConfigError(f"{path}: somebody else is changing it; try again") from None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot change it: {problem}") from None


def _replace(path: Path, text: str) -> None:
    """Put ``text`` in place of the file; a new one is its owner's alone."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sections(document: TOMLDocument) -> Table:
    sections = document[SECTION]
    assert isinstance(sections, dict)
    return sections  # type: ignore[return-value]


def _named(path: Path, accounts: tuple[Account, ...], name: str) -> Account:
    account = named_account(accounts, name)
    if account is None:
        raise ConfigError(f"{path}: there is no tenant {name[:80]!r}")
    return account
