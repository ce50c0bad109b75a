"""``python -m harness.mem_test``: the engine's memory under pressure, in simulated schedules."""

from __future__ import annotations

import sys
from functools import partial

from harness.cli.parser import Parser
from harness.simulation import command
from harness.simulation.generate import MEMORY

PURPOSE = "Simulate too few pages for requests that share prefixes: eviction, spilling, copies."

PROG = "python -m harness.mem_test"


def build_parser(prog: str = PROG) -> Parser:
    """The parser of the command called ``prog``."""
    return command.build_parser(PURPOSE, prog)


main = partial(command.main, MEMORY, PURPOSE, prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
