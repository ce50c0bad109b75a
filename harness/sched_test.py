"""``python -m harness.sched_test``: the engine under thousands of simulated schedules."""

from __future__ import annotations

import sys
from functools import partial

from harness.simulation import command
from harness.simulation.generate import SCHEDULER

PURPOSE = "Simulate arrivals, cancels, slow clients, quotas, preemption, faults and restarts."

PROG = "python -m harness.sched_test"


build_parser = partial(command.build_parser, PURPOSE, PROG)
main = partial(command.main, SCHEDULER, PURPOSE, prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
