"""``python -m harness.mem_test``: the engine's memory under pressure, in simulated schedules."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.cli.parser import Parser
from harness.simulation import command
from harness.simulation.generate import MEMORY

PURPOSE = "Simulate too few pages for requests that share prefixes: eviction, spilling, copies."

PROG = "python -m harness.mem_test"


def build_parser(prog: str = PROG) -> Parser:
    """The parser of the command called ``prog``."""
    return command.build_parser(PURPOSE, prog)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command called ``prog``; returns its exit code."""
    return command.main(MEMORY, PURPOSE, argv, prog)


if __name__ == "__main__":
    sys.exit(main())
