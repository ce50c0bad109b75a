"""``python -m harness.leaving_test``: simulated schedules on a device that abandons steps, with
clients that leave while it computes."""

import sys

from harness.simulation.command import SimulationTool
from harness.simulation.generate import LEAVING

TOOL = SimulationTool(
    "python -m harness.leaving_test",
    "Simulate clients that leave while a step is submitted or waited for: the device abandons it "
    "if nobody else needs it, and what it was to write is lost.",
    LEAVING,
)
build_parser, main = TOOL.build_parser, TOOL.main

if __name__ == "__main__":
    sys.exit(main())
