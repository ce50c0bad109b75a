"""``zinc-rt model``: lists, fetches, selects and removes models.

Results go to standard output, progress to standard error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.amounts import format_bytes
from harness import catalog
from harness.cli.parser import add_json_flag
from harness.console import note, table
from harness.progress import progress_on
from harness.setting_paths import check_paths
from harness.settings import add_flags, resolve

EXAMPLES = """\
examples:
  zinc-rt model list
  zinc-rt model active                  the one that run, chat and serve take
  zinc-rt model pull qwen3-0.6b
  zinc-rt model use ./model.gguf        run, chat and serve take it from now on
  zinc-rt model pull hf.co/unsloth/Qwen3-4B-GGUF:Q4_K_M
  zinc-rt model rm qwen3-0.6b
"""
COLUMNS = ("ID", "SIZE", "MEMORY", "QUANT", "LICENCE", "STATE")


def add_parser(subparsers: Any) -> None:
    """Add the ``model`` command; its parsers set ``func(args) -> exit code``.

    ``subparsers`` is what ``ArgumentParser.add_subparsers`` returned."""
    parser = subparsers.add_parser(
        "model",
        help="list, download and choose models",
        description="List, download and choose models.",
        epilog=EXAMPLES,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    _add_verb(verbs, "list", list_models, "list the known models and what is on this machine", True)
    _add_verb(verbs, "active", show_active, "show the model used when none is named", True)
    for verb, func, text in (
        ("pull", pull_model, "download and verify a model; prints the path of its file"),
        ("use", use_model, "choose the model that is used when none is named"),
        ("rm", remove_model, "delete a downloaded model"),
    ):
        optional = verb == "pull"
        _add_verb(verbs, verb, func, text, False).add_argument(
            "id",
            nargs="?" if optional else None,
            default=catalog.DEFAULT_ID,
            metavar="MODEL",
            help="name of `zinc-rt model list`, or hf.co/ORG/REPO[:QUANT]"
            + (", or the path of a GGUF file" if verb == "use" else "")
            + (f" [default: {catalog.DEFAULT_ID}]" if optional else ""),
        )


def _add_verb(
    verbs: Any, name: str, func: Callable[[argparse.Namespace], int], text: str, listing: bool
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    if listing:
        add_json_flag(parser)
    add_flags(parser, ["cache_dir"])
    parser.set_defaults(func=func)
    return parser


def _cache_dir(args: argparse.Namespace) -> Path:
    settings = resolve(args, ["cache_dir"])
    check_paths(settings)
    cache_dir: Path = settings["cache_dir"]
    return cache_dir


def list_models(args: argparse.Namespace) -> int:
    """Print the catalog with what is installed and active; returns the exit code."""
    cache_dir = _cache_dir(args)
    active = _active_facts(cache_dir)
    rows = [
        {
            **facts,
            "active": active["id"] == facts["id"] or active["path"] == facts["path"] is not None,
        }
        for facts in catalog.managed_models(cache_dir)
    ]
    if not any(row["active"] for row in rows):
        rows.append(active)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        (
            row["id"],
            format_bytes(row["size_bytes"]) if row["size_bytes"] is not None else "",
            format_bytes(row["memory_bytes"]) if "memory_bytes" in row else "",
            row.get("quant", ""),
            row.get("licence", ""),
            ", ".join(state for state in ("installed", "active") if row[state]),
        )
        for row in rows
    ]
    print(table([COLUMNS, *cells]))
    note(
        "MEMORY is about what the file, a sequence of "
        f"{catalog.MEMORY_CONTEXT_TOKENS:,} tokens and the program take"
    )
    return 0


def show_active(args: argparse.Namespace) -> int:
    """Print the model used when none is named; returns the exit code."""
    facts = _active_facts(_cache_dir(args))
    print(json.dumps(facts, indent=2) if args.json else facts["id"])
    return 0


def _active_facts(cache_dir: Path) -> dict[str, Any]:
    """The facts of the model used when none is named."""
    name = catalog.active(cache_dir) or catalog.DEFAULT_ID
    if Path(name).is_absolute():
        facts = catalog.file_facts(Path(name))
    elif catalog.is_hub_name(name):
        facts = catalog.hub_facts(name, catalog.find_pulled(name, cache_dir))
    else:
        facts = catalog.entry_facts(catalog.find(name), catalog.find_pulled(name, cache_dir))
    return {**facts, "active": True}


def pull_model(args: argparse.Namespace) -> int:
    """Fetch and verify a model, print its path; returns the exit code."""
    print(catalog.pull(catalog.find_model(args.id), _cache_dir(args), progress_on()))
    return 0


def use_model(args: argparse.Namespace) -> int:
    """Select the model used when none is named; returns the exit code."""
    cache_dir = _cache_dir(args)
    path = catalog.existing_file(args.id)
    if path is not None:
        catalog.set_active(str(path.resolve()), cache_dir)
        print(f"using {path.resolve()}")
        return 0
    name = catalog.pasted_name(args.id)
    catalog.set_active(name, cache_dir)
    pulled = catalog.find_pulled(name, cache_dir) is not None
    print(f"using {name}" if pulled else f"using {name}; it is pulled when first needed")
    return 0


def remove_model(args: argparse.Namespace) -> int:
    """Delete a pulled model and print the bytes freed; returns the exit code."""
    name = catalog.pasted_name(args.id)
    freed = catalog.remove(name, _cache_dir(args), progress_on())
    print(f"removed {name}: {format_bytes(freed)} freed")
    return 0
