"""``python -m harness.host.remote FD``: see ``harness.host.remote.server``."""

from __future__ import annotations

import sys

from harness.startup import prepare_process

prepare_process()

from harness.host.remote.server import main  # noqa: E402

main(int(sys.argv[1]))
