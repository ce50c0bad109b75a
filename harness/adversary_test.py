"""``python -m harness.adversary_test``: simulated schedules in which clients and operators try to
make the engine break its rules."""

from __future__ import annotations

import sys
from functools import partial

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


main = partial(command.main, ADVERSARY, PURPOSE, prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
