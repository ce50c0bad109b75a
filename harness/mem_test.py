"""``python -m harness.mem_test``: the engine's memory under pressure, in simulated schedules."""

from __future__ import annotations

import sys
from functools import partial

from harness.simulation import command
from harness.simulation.generate import MEMORY

PURPOSE = "Simulate too few pages for requests that share prefixes: eviction, spilling, copies."

PROG = "python -m harness.mem_test"


build_parser = partial(command.build_parser, PURPOSE, PROG)
main = partial(command.main, MEMORY, PURPOSE, prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
