"""``zinc-rt model``: list, pull, use, active and rm for the managed models.

Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import catalog
from harness.catalog import CatalogEntry, PulledModel
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
    rows = [_description(entry, cache_dir, active_id) for entry in catalog.ENTRIES.values()]
    chosen = catalog.find_pulled(active_id, cache_dir)
    for found in catalog.pulled_from_hub(cache_dir):
        is_active = chosen is not None and chosen.path == found.path
        rows.append(_hub_description(found.id, found, is_active))
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


def _description(entry: CatalogEntry, cache_dir: Path, active_id: str) -> dict[str, Any]:
    """One model as JSON shows it; sizes in bytes, ``path`` null until it is installed."""
    found = catalog.find_pulled(entry.id, cache_dir)
    return {
        "id": entry.id,
        "name": entry.name,
        "architecture": entry.architecture,
        "parameters": entry.parameters,
        "quant": entry.quant,
        "licence": entry.licence,
        "size_bytes": entry.file.size,
        "memory_bytes": entry.memory,
        "sha256": entry.file.sha256,
        "source": str(entry.file.source),
        "installed": found is not None,
        "active": entry.id == active_id,
        "path": str(found.path) if found else None,
    }


def _hub_description(name: str, found: PulledModel | None, is_active: bool) -> dict[str, Any]:
    """A model named as on the hub, as far as the cache knows it."""
    return {
        "id": name,
        "size_bytes": found.size if found else None,
        "source": name,
        "installed": found is not None,
        "active": is_active,
        "path": str(found.path) if found else None,
    }


def show_active(args: argparse.Namespace) -> int:
    """Print the model used when none is named; returns the exit code."""
    cache_dir = _cache_dir(args)
    name = catalog.active(cache_dir) or catalog.DEFAULT_ID
    if not args.json:
        print(name)
        return 0
    if catalog.is_hub_name(name):
        facts = _hub_description(name, catalog.find_pulled(name, cache_dir), True)
    else:
        facts = _description(catalog.find(name), cache_dir, name)
    print(json.dumps(facts, indent=2))
    return 0


def pull_model(args: argparse.Namespace) -> int:
    """Fetch and verify a model, print its path; returns the exit code."""
    print(catalog.pull(catalog.find_model(args.id), _cache_dir(args), progress_on()))
    return 0


def use_model(args: argparse.Namespace) -> int:
    """Make a model the one used when none is named; returns the exit code."""
    cache_dir = _cache_dir(args)
    catalog.set_active(args.id, cache_dir)
    pulled = catalog.find_pulled(args.id, cache_dir) is not None
    print(f"using {args.id}" if pulled else f"using {args.id}; it is pulled when first needed")
    return 0


def remove_model(args: argparse.Namespace) -> int:
    """Delete a pulled model and say what was freed; returns the exit code."""
    freed = catalog.remove(args.id, _cache_dir(args), progress_on())
    print(f"removed {args.id}: {format_bytes(freed)} freed")
    return 0
