"""``python -m zinc_rt`` is ``zinc-rt``."""

from __future__ import annotations

import sys

from harness.console_script import entry

if __name__ == "__main__":
    sys.exit(entry())
