"""``python -m harness.sched_test``: the engine under thousands of simulated schedules."""

from __future__ import annotations

import sys
from functools import partial

from harness.cli.parser import Parser
from harness.simulation import command
from harness.simulation.generate import SCHEDULER

PURPOSE = "Simulate arrivals, cancels, slow clients, quotas, preemption, faults and restarts."

PROG = "python -m harness.sched_test"


def build_parser(prog: str = PROG) -> Parser:
    """The parser of the command called ``prog``."""
    return command.build_parser(PURPOSE, prog)


main = partial(command.main, SCHEDULER, PURPOSE, prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
