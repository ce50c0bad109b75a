"""``zinc-rt check``: prints READY, or what is wrong with this machine and how to fix it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from harness.cli.parser import add_json_flag
from harness.cli.sessions import RUN_SETTINGS
from harness.console import printable
from harness.settings import add_flags, resolve

NOT_READY = 1


def add_parser(subparsers: Any) -> None:
    """Add the ``check`` command; its parser sets ``func(args) -> exit code``."""
    text = "say READY, or what is wrong on this machine and how to repair it"
    parser = subparsers.add_parser(
        "check", help=text, description=text, epilog="Exits with 0 when READY, else with 1."
    )
    add_json_flag(parser)
    add_flags(parser, RUN_SETTINGS)
    parser.rare |= {"temperature", "seed", "max_tokens", "system", "thinking"}
    parser.set_defaults(func=check)


def check(args: argparse.Namespace) -> int:
    """Print every finding and the verdict."""
    settings = resolve(args, RUN_SETTINGS)
    from harness.cli.findings import all_findings

    if args.json:
        findings = list(all_findings(settings))
        ready = all(finding.ok for finding in findings)
        document = {
            "ready": ready,
            "findings": list(map(asdict, findings)),
            "settings": {
                name: {"value": _plain(value), "source": settings.sources[name]}
                for name, value in settings.items()
            },
        }
        print(json.dumps(document, indent=2))
        return 0 if ready else NOT_READY
    ready = True
    for finding in all_findings(settings):
        ready = ready and finding.ok
        print(f"{'ok   ' if finding.ok else 'WRONG'}  {finding.subject}: ", end="")
        print(printable(finding.detail), flush=True)
        if not finding.ok:
            print(f"       {printable(finding.remedy)}", flush=True)
    for name, value in settings.items():
        if settings.sources[name] != "default":
            print(f"set    {name} = {printable(str(value))} ({settings.sources[name]})")
    print("READY" if ready else "NOT READY")
    return 0 if ready else NOT_READY


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
