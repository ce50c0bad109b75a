"""``zinc-rt devices``: lists the tiers of this build and the device each one runs on or lacks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from harness.cli.parser import add_json_flag
from harness.console import table


def add_parser(subparsers: Any) -> None:
    """Add the ``devices`` command; its parser sets ``func(args) -> exit code``."""
    text = "list the tiers: what each runs on, or what it lacks on this machine"
    parser = subparsers.add_parser("devices", help=text, description=text)
    add_json_flag(parser)
    parser.set_defaults(func=devices)


def devices(args: argparse.Namespace) -> int:
    """Print one row for every tier."""
    from harness.tiers import probe

    statuses = probe()
    if args.json:
        print(json.dumps([dataclasses.asdict(status) for status in statuses], indent=2))
        return 0
    rows = [("TIER", "RUNS", "ON, OR WHAT IS MISSING")]
    for status in statuses:
        missing = f"{status.reason}; {status.remedy}"
        runs = "yes" if status.available else "no"
        rows.append((status.name, runs, status.device if status.available else missing))
        rows += [("", "", line) for line in status.details]
    print(table(rows))
    return 0
