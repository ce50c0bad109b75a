"""``zinc-rt receipts``: the keys and chains of a folder of receipts; and their verification."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.user_folders import user_folder
from contract.errors import ConfigError
from harness.cli.parser import add_file, add_switch, path_argument, whole_number
from harness.cli.sessions import model_file
from harness.console import note, printable, table
from harness.setting_paths import check_folder
from harness.settings import Settings, group_of

if TYPE_CHECKING:
    from harness.serve.model import ModelOptions

FLAG = "--receipts"
DIFFERENT = 1
NOT_WHOLE = 3
EXAMPLES = """\
examples:
  zinc-rt receipts key > keys.jsonl         the public keys, for verifiers
  zinc-rt receipts key --rotate             sign with a new key from now on
  zinc-rt receipts list                     how many receipts each tenant has
  zinc-rt receipts export 0 > chain.jsonl   the receipts of tenant 0, one a line
"""


def default_folder() -> Path:
    """File of the key of ``run --receipt``."""
    return user_folder("state") / "receipts"


def add_parser(subparsers: Any) -> None:
    """Add the ``receipts`` command; its parsers set ``func(args) -> exit code``."""
    text = "show the keys and the receipts of a server, or of this machine's user"
    parser = subparsers.add_parser("receipts", help=text, description=text, epilog=EXAMPLES)
    actions = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what, function in (
        ("key", "print the public keys, the oldest first; the first use makes one", _key),
        ("list", "show how many receipts each tenant has", _list),
        ("export", "print the receipts of a tenant, one a line", _export),
    ):
        action = actions.add_parser(name, help=what, description=what)
        group = group_of(action, "receipts")
        group.add_argument(
            "--receipts",
            dest="folder",
            type=path_argument,
            metavar="DIR",
            default=None,
            help="the folder of `zinc-rt serve --receipts` [default: this user's]",
        )
        if function is _key:
            add_switch(group, "--rotate", help="make a new key first")
        if function is _export:
            action.add_argument(
                "tenant",
                type=_tenant_number,
                metavar="TENANT",
                help="a tenant's number, as `zinc-rt receipts list` shows it",
            )
        action.set_defaults(func=function)


def _tenant_number(text: str) -> int:
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a tenant's number; `zinc-rt receipts list` shows the numbers"
        ) from None


def _key(args: argparse.Namespace) -> int:
    from harness.serve.receipts.keys import HISTORY, open_key, public_keys, rotate_receipt_key

    folder = _folder(args)
    if args.rotate or not os.path.exists(folder / HISTORY):
        check_folder(FLAG, folder, written=True)
    (rotate_receipt_key if args.rotate else open_key)(folder)
    public_keys(folder)
    print((folder / HISTORY).read_text(), end="")
    return 0


def _list(args: argparse.Namespace) -> int:
    with _store(_folder(args)) as store:
        rows = [(str(tenant), f"{count:,}") for tenant, count in sorted(store.tenants().items())]
    print(table([("TENANT", "RECEIPTS"), *rows], right=(0, 1)))
    return 0


def _export(args: argparse.Namespace) -> int:
    with _store(_folder(args)) as store:
        for document in store.exported(args.tenant):
            print(document)
    return 0


def _folder(args: argparse.Namespace) -> Path:
    """The folder of the flag, or this user's. Raises ConfigError."""
    if args.folder is None:
        return default_folder()
    check_folder(FLAG, args.folder, written=False)
    folder: Path = args.folder
    return folder


def _store(folder: Path) -> Any:
    from harness.serve.receipts.store import FILE, ReceiptStore

    if not (folder / FILE).exists():
        raise ConfigError(f"{folder}: holds no receipts; name the folder with --receipts DIR")
    return ReceiptStore(folder)


def add_receipt_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``verify`` that are for receipts."""
    group = group_of(parser, "receipts")
    group.add_argument(
        "--sample",
        type=whole_number,
        metavar="N",
        help="compute N steps again, drawn by chance, not all",
    )
    add_file(group, "--key", help="public keys to trust (zinc-rt receipts key)")
    group.add_argument("--tenant", metavar="NAME", help="whose receipts they must be")


def refuse_receipt_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag of receipts where an answer is verified."""
    for name in ("sample", "key", "tenant"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for receipts; leave out RESPONSE, or the flag")


def verify_receipt_file(
    args: argparse.Namespace,
    settings: Settings,
    options_of: Callable[[Settings, Path], ModelOptions],
) -> int:
    """Verify the receipts of a file with the model of the settings."""
    from harness.host.engine_thread import EngineThread
    from harness.progress import progress_on
    from harness.serve.model import open_model
    from harness.serve.receipts.document import Receipt, read_receipts
    from harness.serve.receipts.keys import public_keys
    from harness.serve.receipts.verify import ReceiptDemands, chain_verdict, verify_receipts

    if args.sample is not None and args.sample < 1:
        raise ConfigError("--sample is the number of steps, at least 1")
    receipts: list[Receipt] = read_receipts(args.request)
    trusted = None if args.key is None else public_keys(args.key)
    if trusted is None:
        keys = ", ".join(sorted({receipt.signature.key[:16] for receipt in receipts}))
        note(f"note: signed by {keys}; give --key FILE to require a key you trust")
    lines = chain_verdict(receipts) if len(receipts) > 1 else []
    path = model_file(settings)
    options = _recorded_options(options_of(settings, path), settings, receipts)
    with ExitStack() as owned:
        thread = owned.enter_context(EngineThread())
        progress = progress_on(transient=True)
        model = open_model(path, options, thread, owned, progress)
        demands = ReceiptDemands(trusted, args.tenant, args.sample)
        for verdict in verify_receipts(receipts, model, demands, progress):
            lines += verdict.lines
    for line in lines:
        print(printable(line))
    if any(line.startswith("different") for line in lines):
        return DIFFERENT
    return NOT_WHOLE if any(line.startswith("not whole") for line in lines) else 0


def _recorded_options(options: ModelOptions, settings: Settings, receipts: Any) -> ModelOptions:
    """The options with what the receipts say of the server: the storage of keys and values, unless
    that is given, and how far penalties look back."""
    session = replace(options.session, digests=True)
    dtypes = {receipt.payload.model.kv_dtype for receipt in receipts}
    from contract.dtypes import KV_DTYPES
    from harness.serve.verify import MAX_VALUE

    known = {dtype.name for dtype in KV_DTYPES}
    if settings.sources["kv_dtype"] == "default" and len(dtypes) == 1 and dtypes <= known:
        session = replace(session, kv_dtype=dtypes.pop())
    reach = [
        int(choice.sampling.get("repeat_last_n", 0))
        for receipt in receipts
        for choice in receipt.payload.choices
    ]
    window = max([session.repeat_last_n, *(each for each in reach if each <= MAX_VALUE)])
    return replace(options, session=replace(session, repeat_last_n=window))
