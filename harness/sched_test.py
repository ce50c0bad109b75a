"""``python -m harness.sched_test``: the engine under thousands of simulated schedules."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.cli.parser import Parser
from harness.simulation import command
from harness.simulation.generate import SCHEDULER

PURPOSE = "Simulate arrivals, cancels, slow clients, quotas, preemption, faults and restarts."

PROG = "python -m harness.sched_test"


def build_parser(prog: str = PROG) -> Parser:
    """The parser of the command called ``prog``."""
    return command.build_parser(PURPOSE, prog)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command called ``prog``; returns its exit code."""
    return command.main(SCHEDULER, PURPOSE, argv, prog)


if __name__ == "__main__":
    sys.exit(main())
