"""``python -m harness.mem_test``: the engine's memory under pressure, in simulated schedules."""

import sys

from harness.simulation.command import main
from harness.simulation.generate import MEMORY

PURPOSE = "Simulate too few pages for requests that share prefixes: eviction, spilling, copies."

if __name__ == "__main__":
    sys.exit(main(MEMORY, PURPOSE))
