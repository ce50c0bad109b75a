"""Changes the tenants file: one change at a time, atomically, with comments preserved.

The new file is written in the same folder and then renamed over the old one, so a reader finds
either the old or the new file. A change that makes the file invalid is refused."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import tomlkit
from filelock import FileLock
from tomlkit.items import Table
from tomlkit.toml_document import TOMLDocument

from contract.cached_files import replacing, unfinished
from contract.errors import ConfigError, system_words
from harness.serve.keys import key_digest, new_key
from harness.tenants import SECTION, Account, accounts_of, named_account
from harness.toml_file import read_text

NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
"""Valid names of tenants created here: usable in a URL, and not a number."""
LOCK_SECONDS = 30.0
Check = Callable[[Sequence[Account]], None]
"""Raises ConfigError for unusable accounts, before they are written."""

Show = Callable[[str], None]
"""Shows a new key, just before the file gets it: what it raises leaves the file as it was, so that
no key is valid that nobody has."""


def any_accounts(accounts: Sequence[Account]) -> None:
    """A check that accepts everything."""


def returned(key: str) -> None:
    """A key that only the caller gets."""


def add_tenant(
    path: Path,
    name: str,
    values: Mapping[str, Any],
    min_id: int = 1,
    check: Check = any_accounts,
    show: Show = returned,
) -> str:
    """Add a tenant with a new key, which is shown and returned; the file stores its digest. A
    missing file is created.

    ``values`` are fields of ``contract.types.Tenant`` and rights. Without ``id`` it is one above
    all existing ids and at least ``min_id``, so that the id of a removed tenant is not reused
    while usage is recorded under it. Raises ConfigError."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name[:80]!r} cannot be a tenant's name: use A-Z, a-z, 0-9, '.', '_', '-', '@', "
            "at most 64 of them, and not digits alone"
        )
    key = new_key()
    made = _editing(path, check, lambda: show(key), may_be_absent=True)
    with made as (document, accounts):
        if any(account.tenant.name == name for account in accounts):
            raise ConfigError(f"{path}: there is a tenant {name!r} already")
        highest = max((account.tenant.id for account in accounts), default=0)
        table = tomlkit.table()
        table["id"] = max(highest + 1, min_id)
        table.update(values)
        table["keys"] = [key_digest(key)]
        if SECTION not in document:
            document[SECTION] = tomlkit.table(is_super_table=True)
        _sections(document)[name] = table
    return key


def rotate_key(path: Path, name: str, *, keep_old: bool = False, show: Show = returned) -> str:
    """Replace a tenant's keys by a new one, which is shown and returned; with ``keep_old`` the
    latest old key remains valid until the next change. Raises ConfigError."""
    key = new_key()
    with _editing(path, written=lambda: show(key)) as (document, accounts):
        account = _named(path, accounts, name)
        old_keys = account.keys[-1:] if keep_old else ()
        _sections(document)[account.tenant.name]["keys"] = [*old_keys, key_digest(key)]
    return key


def remove_tenant(path: Path, name: str) -> Account:
    """Remove a tenant and return its account. Raises ConfigError."""
    with _editing(path) as (document, accounts):
        account = _named(path, accounts, name)
        if len(accounts) == 1:
            who = account.tenant.name
            raise ConfigError(f"{path}: {who} is its only tenant; add another, or delete the file")
        del _sections(document)[account.tenant.name]
    return account


@contextmanager
def _editing(
    path: Path,
    check: Check = any_accounts,
    written: Callable[[], None] = lambda: None,
    *,
    may_be_absent: bool = False,
) -> Iterator[tuple[TOMLDocument, tuple[Account, ...]]]:
    """Yield the file's document, to be changed, and its accounts. At the end of the block the new
    file is written; it becomes the file once ``written`` was called."""
    path = path.resolve()
    with ExitStack() as held:
        with _refusals(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS)
            held.enter_context(lock)
            text = read_text(path, "file of tenants", may_be_absent=may_be_absent)
            accounts = accounts_of(tomllib.loads(text), path) if text.strip() else ()
            document = tomlkit.parse(text)
            yield document, accounts
            changed = tomlkit.dumps(document)
            after = accounts_of(tomllib.loads(changed), path)
            if not any(account.keys for account in after):
                raise ConfigError(f"{path}: no tenant would have a key left")
            check(after)
            held.enter_context(_replacing(path, changed))
        written()
        with _refusals(path):
            held.close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Raises ConfigError for what the system, a lock or the file refuses."""
    try:
        yield
    except TimeoutError:
        raise ConfigError(f"{path}: somebody else is changing it; try again") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot change it: {system_words(error)}") from None


@contextmanager
def _replacing(path: Path, text: str) -> Iterator[None]:
    """Replace the file's contents by ``text``, which is on the disk, at the end of the block; only
    its owner can read a new file."""
    # This process has the lock, so the writers of other unfinished files were killed.
    for left in unfinished(path):
        left.unlink(missing_ok=True)
    with replacing(path, 0o600) as file:
        file.write(text.encode())
        with suppress(FileNotFoundError):
            os.chmod(file.name, path.stat().st_mode & 0o777)
        file.flush()
        os.fsync(file.fileno())
        yield
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
