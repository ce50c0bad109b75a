"""``python -m harness.adversary_test``: simulated schedules in which clients and operators try to
make the engine break its rules."""

from __future__ import annotations

import sys
from functools import partial

from harness.simulation import command
from harness.simulation.generate import ADVERSARY

PURPOSE = (
    "Simulate tenants that flood, label, cancel, move between groups, are removed and come back, "
    "reserve pages and ask with the longest prompts; copies that fail; interrupts at any line."
)

PROG = "python -m harness.adversary_test"


build_parser = partial(command.build_parser, PURPOSE, PROG)
main = partial(command.main, ADVERSARY, PURPOSE, prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
