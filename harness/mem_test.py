"""``python -m harness.mem_test``: the engine's memory under pressure, in simulated schedules."""

import sys

from harness.simulation.command import SimulationTool
from harness.simulation.generate import MEMORY

TOOL = SimulationTool(
    "python -m harness.mem_test",
    "Simulate too few pages for requests that share prefixes: eviction, spilling, copies.",
    MEMORY,
)
build_parser, main = TOOL.build_parser, TOOL.main

if __name__ == "__main__":
    sys.exit(main())
