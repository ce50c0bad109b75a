"""``python -m harness.adversary_test``: simulated schedules in which clients and operators try to
make the engine break its rules."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.cli.parser import Parser
from harness.simulation import command
from harness.simulation.generate import ADVERSARY

PURPOSE = (
    "Simulate tenants that flood, label, cancel, move between groups, are removed and come back, "
    "reserve pages and ask with the longest prompts; copies that fail; interrupts at any line."
)

PROG = "python -m harness.adversary_test"


def build_parser(prog: str = PROG) -> Parser:
    """The parser of the command called ``prog``."""
    return command.build_parser(PURPOSE, prog)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command called ``prog``; returns its exit code."""
    return command.main(ADVERSARY, PURPOSE, argv, prog)


if __name__ == "__main__":
    sys.exit(main())
