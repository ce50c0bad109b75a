"""``python -m zinc_rt`` is ``zinc-rt``. Importing this module changes no handling of Ctrl-C."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from harness.console_script import entry

    sys.exit(entry())
