"""``zinc-rt tenants``: the tenants of a server, their keys and their usage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from contract.errors import ConfigError
from contract.types import QosClass, Tenant
from harness.cli.parser import (
    add_count,
    add_json_flag,
    add_switch,
    path_argument,
    real_number,
    whole_number,
)
from harness.console import note, table
from harness.extras import optional_libraries
from harness.setting_paths import check_paths
from harness.settings import add_flags, group_of, resolve
from harness.tenants import RIGHTS, account_facts, named_account, read_accounts

EXAMPLES = """\
examples:
  zinc-rt tenants add alice --tenants tenants.toml --qos interactive
  zinc-rt tenants list --tenants tenants.toml
  zinc-rt tenants usage alice --tenants tenants.toml
  zinc-rt tenants rotate alice --tenants tenants.toml --keep-old
  zinc-rt tenants rm alice --tenants tenants.toml
  zinc-rt tenants key --name alice --id 1     a key, and its lines for the file
  zinc-rt tenants check tenants.toml          is the file correct

A running server reads its file again a second after a change. A key is shown
only once; the file has its digest. ZINC_RT_TENANTS names the file, too.
"""
COLUMNS = ("ID", "NAME", "CLASS", "KEYS", "RIGHTS", "SLOTS", "PAGES", "CONTEXT")
COUNTED = (
    *("requests", "completed", "rejected"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
)
NUMBERS = {
    field.name: real_number if field.name == "weight" else whole_number
    for field in fields(Tenant)
    if field.name not in ("name", "qos")
}
"""The numeric fields of a tenant, and the parser of each."""
LIMIT_HELP = {
    "id": "its number; usage is counted by number and name [the next free one]",
    "weight": "its share of the machine, next to others that are waiting [1]",
    "max_slots": "most requests that are answered at once [4]",
    "max_kv_pages": "most pages of context, 16 tokens each, that it uses at once [4096]",
    "isolation_group": "tenants with the same number share cached prompts [nobody]",
    "decode_tokens_per_s": "most tokens a second of its answers [1000]",
    "prefill_tokens_per_s": "most tokens a second of its prompts [100000]",
    "max_context": "most tokens of a prompt and its answer [128000]",
    "max_waiting": "most requests that wait [4096]",
    "reserved_pages": "pages of context that others never get [0]",
}
"""The help text of each numeric field."""


def add_parser(subparsers: Any) -> None:
    """Add the ``tenants`` command; its parsers set ``func(args) -> exit code``."""
    text = "add, list and remove the users of a server, and make their API keys"
    parser = subparsers.add_parser("tenants", help=text, description=text, epilog=EXAMPLES)
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    add = _add_verb(
        verbs, "add", add_one, "add a tenant and print its key, shown only once", "ledger"
    )
    add.add_argument("name", metavar="NAME", help="the new tenant's name")
    group = group_of(add, "tenant")
    group.add_argument(
        "--qos", choices=[qos.value for qos in QosClass], help="the tenant's class of service"
    )
    for name, kind in NUMBERS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="N", help=LIMIT_HELP[name])
    models = "the only models it may use [default: all]"
    group.add_argument("--models", type=names_of, metavar="NAME[,NAME]", help=models)
    for right, what in zip(
        RIGHTS, ("read the usage of all tenants", "change models and tenants"), strict=True
    ):
        group.add_argument(f"--{right}", action="store_true", help=f"may {what}")
    shown = _add_verb(verbs, "list", list_all, "show the tenants of the file")
    add_json_flag(shown)
    usage = _add_verb(
        verbs, "usage", show_usage, "show requests and tokens of each tenant", "ledger"
    )
    usage.add_argument("name", metavar="NAME", nargs="?", help="show this tenant only, by day")
    add_json_flag(usage)
    rotate = _add_verb(
        verbs, "rotate", rotate_one, "give a tenant a new key and print it, shown only once"
    )
    rotate.add_argument("name", metavar="NAME", help="the tenant's name")
    add_switch(
        group_of(rotate, "tenant"), "--keep-old", help="the old key stays valid until the next one"
    )
    remove = _add_verb(verbs, "rm", remove_one, "remove a tenant; its running answers end")
    remove.add_argument("name", metavar="NAME", help="the tenant's name")
    _add_without_file(verbs)


def _add_verb(
    verbs: Any, name: str, func: Callable[[argparse.Namespace], int], text: str, *settings: str
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    add_flags(verb, ["tenants", *settings])
    verb.set_defaults(func=func)
    return verb


def _add_without_file(verbs: Any) -> None:
    """Add the subcommands that change no file."""
    text = "print a new API key, and the lines with its digest for the file"
    key = verbs.add_parser("key", help=text, description=text)
    group = group_of(key, "tenant")
    group.add_argument("--name", default="NAME", metavar="NAME", help="the tenant's name")
    add_count(group, "--id", 1, "the tenant's number")
    key.set_defaults(func=make_key)
    text = "check a file of tenants as a server reads it"
    check = verbs.add_parser("check", help=text, description=text)
    check.add_argument("file", metavar="FILE", type=path_argument, help="the file of tenants")
    check.set_defaults(func=check_file)


def names_of(text: str) -> list[str]:
    """The names of a list with commas. Raises ArgumentTypeError where there is none: an empty list
    of models would mean all models."""
    names = [name for name in map(str.strip, text.split(",")) if name]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def add_one(args: argparse.Namespace) -> int:
    """Add a tenant and print its key."""
    given = {name: getattr(args, name) for name in (*NUMBERS, "qos", "models")}
    values = {name: value for name, value in given.items() if value is not None}
    values |= {right: True for right in RIGHTS if getattr(args, right)}
    settings = resolve(args, ["ledger"])
    check_paths(settings)
    counted = _counted(settings["ledger"]) if "id" not in values else frozenset()
    _editor().add_tenant(
        _file(args, made=True), args.name, values, max(counted, default=0) + 1, show=_shown(args)
    )
    return 0


def list_all(args: argparse.Namespace) -> int:
    """Print the tenants."""
    rows = [account_facts(account) for account in read_accounts(_file(args))]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        (
            *(str(row[name]) for name in ("id", "name", "qos", "keys")),
            ", ".join(right for right in RIGHTS if row[right]),
            *(f"{row[name]:,}" for name in ("max_slots", "max_kv_pages", "max_context")),
        )
        for row in rows
    ]
    print(table([COLUMNS, *cells], right=(0, 3, 5, 6, 7)))
    return 0


def show_usage(args: argparse.Namespace) -> int:
    """Print the usage of all tenants, or of one tenant day by day."""
    from harness.serve.ledger_store import LedgerStore

    settings = resolve(args, ["ledger"])
    check_paths(settings)
    ledger: Path = settings["ledger"]
    if not ledger.exists():
        raise ConfigError(f"{ledger}: no such ledger; a server makes it (--ledger)")
    accounts = read_accounts(_file(args))
    with LedgerStore(ledger) as store:
        if args.name is None:
            counts = {each.tenant.name: store.total(each.tenant)._asdict() for each in accounts}
        else:
            account = named_account(accounts, args.name)
            if account is None:
                raise ConfigError(f"there is no tenant {args.name!r}; see `zinc-rt tenants list`")
            days = store.days(account.tenant)
            counts = {day: each._asdict() for day, each in days.items()}
    if args.json:
        print(json.dumps(counts, indent=2))
        return 0
    head = ("TENANT" if args.name is None else "DAY", *(name.upper() for name in COUNTED))
    rows = [(name, *(f"{each[field]:,}" for field in COUNTED)) for name, each in counts.items()]
    print(table([head, *rows], right=range(1, len(head))))
    return 0


def rotate_one(args: argparse.Namespace) -> int:
    """Give a tenant a new key and print it."""
    _editor().rotate_key(_file(args), args.name, keep_old=args.keep_old, show=_shown(args))
    return 0


def remove_one(args: argparse.Namespace) -> int:
    """Remove a tenant."""
    removed = _editor().remove_tenant(_file(args), args.name)
    print(f"removed {removed.tenant.name}; the ledger still has its usage")
    return 0


def make_key(args: argparse.Namespace) -> int:
    """Print a key and the lines to add to the file."""
    from harness.serve.keys import key_digest, new_key

    try:
        Tenant(args.id, args.name).validate()
    except ConfigError as error:
        raise ConfigError(f"flags --id and --name: {error}") from None
    key = new_key()
    _print_key(key, "a key, shown only once, and lines for the file of tenants:")
    print(f'\n[tenant.{args.name}]\nid = {args.id}\nkeys = ["{key_digest(key)}"]')
    return 0


def _shown(args: argparse.Namespace) -> Callable[[str], None]:
    """Prints the key of the tenant that is named."""
    return partial(_print_key, what=f"the key of {args.name}, shown only once:")


def _print_key(key: str, what: str) -> None:
    """Print a key alone on standard output, for scripts, and what it is on standard error."""
    note(what)
    print(key, flush=True)


def check_file(args: argparse.Namespace) -> int:
    """Print a line for each tenant of a file."""
    for account in read_accounts(args.file):
        tenant = account.tenant
        rights = "".join(f", {right}" for right in RIGHTS if getattr(account, right))
        print(f"{tenant.id} {tenant.name}: {tenant.qos.value}, {len(account.keys)} keys{rights}")
    return 0


def _editor() -> ModuleType:
    """The module that edits tenants files; its library is installed with the server."""
    with optional_libraries():
        from harness import tenants_file
    return tenants_file


def _file(args: argparse.Namespace, *, made: bool = False) -> Path:
    """The file of tenants, which is ``made`` where it is not there. Raises ConfigError."""
    settings = resolve(args, ["tenants"])
    path: Path | None = settings["tenants"]
    if path is None:
        raise ConfigError("which file of tenants? give --tenants FILE, or set ZINC_RT_TENANTS")
    check_paths(settings, written=["tenants"] if made else ())
    return path


def _counted(ledger: Path) -> frozenset[int]:
    """The ids of tenants with usage in the ledger."""
    from harness.serve.ledger_store import LedgerStore

    if not ledger.exists():
        return frozenset()
    with LedgerStore(ledger) as store:
        return store.tenants()
