"""``python -m harness.adversary_test``: simulated schedules in which clients and operators try to
make the engine break its rules."""

import sys

from harness.simulation.command import SimulationTool
from harness.simulation.generate import ADVERSARY

TOOL = SimulationTool(
    "python -m harness.adversary_test",
    "Simulate tenants that flood, label, cancel, move between groups, are removed and come back, "
    "reserve pages and ask with the longest prompts; copies that fail; interrupts at any line.",
    ADVERSARY,
)
build_parser, main = TOOL.build_parser, TOOL.main

if __name__ == "__main__":
    sys.exit(main())
