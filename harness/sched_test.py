"""``python -m harness.sched_test``: the engine under thousands of simulated schedules."""

import sys

from harness.simulation.command import main
from harness.simulation.generate import SCHEDULER

PURPOSE = "Simulate arrivals, cancels, slow clients, quotas, preemption, faults and restarts."

if __name__ == "__main__":
    sys.exit(main(SCHEDULER, PURPOSE))
