"""``python -m harness.adversary_test``: the engine among those who would bend it, in simulated
schedules."""

import sys

from harness.simulation.command import main
from harness.simulation.generate import ADVERSARY

PURPOSE = (
    "Simulate tenants that flood, label, cancel, move between groups, are removed and come back,\n"
    "reserve pages and ask with the longest prompts; copies that fail; interrupts at any line."
)

if __name__ == "__main__":
    sys.exit(main(ADVERSARY, PURPOSE))
