"""``python -m harness`` is ``zinc-rt``."""

from __future__ import annotations

import sys

from harness.console_script import entry

sys.exit(entry())
