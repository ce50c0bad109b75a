"""``zinc-rt model``: lists, pulls, selects and removes managed models.

Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import catalog
from harness.console import table
from harness.progress import format_bytes, progress_on
from harness.settings import add_flags, resolve

COLUMNS = ("ID", "SIZE", "MEMORY", "QUANT", "LICENCE", "STATE")


def add_parser(subparsers: Any) -> None:
    """Add the ``model`` command; its parsers set ``func(args) -> exit code``.

    ``subparsers`` is what ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser("model", help="list, pull and choose managed models")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_verb(verbs, "list", list_models, "show the catalog and what is installed", True)
    _add_verb(verbs, "active", show_active, "show the model used when none is named", True)
    for verb, func, text in (
        ("pull", pull_model, "download and verify a model; prints the path of its file"),
        ("use", use_model, "make a model the one used when none is named"),
        ("rm", remove_model, "delete a pulled model"),
    ):
        optional = verb == "pull"
        _add_verb(verbs, verb, func, text, False).add_argument(
            "id",
            nargs="?" if optional else None,
            default=catalog.DEFAULT_ID,
            help="catalog id, see `zinc-rt model list`, or hf.co/ORG/REPO[:QUANT]"
            + (f" (default: {catalog.DEFAULT_ID})" if optional else ""),
        )


def _add_verb(
    verbs: Any, name: str, func: Callable[[argparse.Namespace], int], text: str, listing: bool
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    if listing:
        parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, ["cache_dir"])
    parser.set_defaults(func=func)
    return parser


def _cache_dir(args: argparse.Namespace) -> Path:
    cache_dir: Path = resolve(args, ["cache_dir"])["cache_dir"]
    return cache_dir


def list_models(args: argparse.Namespace) -> int:
    """Print the catalog with what is installed and active; returns the exit code."""
    cache_dir = _cache_dir(args)
    active_id = catalog.active(cache_dir) or catalog.DEFAULT_ID
    chosen = catalog.find_pulled(active_id, cache_dir)
    path = None if chosen is None else str(chosen.path)
    rows = [
        {**facts, "active": facts["id"] == active_id or facts["path"] == path is not None}
        for facts in catalog.managed_models(cache_dir)
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        (
            row["id"],
            format_bytes(row["size_bytes"]),
            format_bytes(row["memory_bytes"]) if "memory_bytes" in row else "",
            row.get("quant", ""),
            row.get("licence", ""),
            _state(row),
        )
        for row in rows
    ]
    print(table([COLUMNS, *cells]))
    return 0


def _state(row: dict[str, Any]) -> str:
    return ", ".join(state for state in ("installed", "active") if row[state])


def show_active(args: argparse.Namespace) -> int:
    """Print the model used when none is named; returns the exit code."""
    cache_dir = _cache_dir(args)
    name = catalog.active(cache_dir) or catalog.DEFAULT_ID
    if not args.json:
        print(name)
        return 0
    found = catalog.find_pulled(name, cache_dir)
    if catalog.is_hub_name(name):
        facts = catalog.hub_facts(name, found)
    else:
        facts = catalog.entry_facts(catalog.find(name), found)
    facts["active"] = True
    print(json.dumps(facts, indent=2))
    return 0


def pull_model(args: argparse.Namespace) -> int:
    """Fetch and verify a model, print its path; returns the exit code."""
    print(catalog.pull(catalog.find_model(args.id), _cache_dir(args), progress_on()))
    return 0


def use_model(args: argparse.Namespace) -> int:
    """Select the model used when none is named; returns the exit code."""
    cache_dir = _cache_dir(args)
    catalog.set_active(args.id, cache_dir)
    pulled = catalog.find_pulled(args.id, cache_dir) is not None
    print(f"using {args.id}" if pulled else f"using {args.id}; it is pulled when first needed")
    return 0


def remove_model(args: argparse.Namespace) -> int:
    """Delete a pulled model and print the bytes freed; returns the exit code."""
    freed = catalog.remove(args.id, _cache_dir(args), progress_on())
    print(f"removed {args.id}: {format_bytes(freed)} freed")
    return 0
