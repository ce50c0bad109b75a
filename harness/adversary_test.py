"""``python -m harness.adversary_test``: simulated schedules in which clients and operators try to
make the engine break its rules."""

import sys

from harness.simulation.command import main
from harness.simulation.generate import ADVERSARY

PURPOSE = (
    "Simulate tenants that flood, label, cancel, move between groups, are removed and come back,\n"
    "reserve pages and ask with the longest prompts; copies that fail; interrupts at any line."
)

if __name__ == "__main__":
    sys.exit(main(ADVERSARY, PURPOSE))
