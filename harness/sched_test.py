"""``python -m harness.sched_test``: the engine under thousands of simulated schedules."""

import sys

from harness.simulation.command import SimulationTool
from harness.simulation.generate import SCHEDULER

TOOL = SimulationTool(
    "python -m harness.sched_test",
    "Simulate arrivals, cancels, slow clients, quotas, preemption, faults and restarts.",
    SCHEDULER,
)
build_parser, main = TOOL.build_parser, TOOL.main

if __name__ == "__main__":
    sys.exit(main())
