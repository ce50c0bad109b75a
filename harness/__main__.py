"""``python -m harness`` is ``zinc-rt``."""

from __future__ import annotations

import sys

from harness.cli.main import entry

sys.exit(entry())
