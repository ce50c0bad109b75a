"""``python -m harness.bench.load.attended MODULE WORD...``: as ``python -m MODULE WORD...``, but it
is told to end, by SIGTERM, once its standard input does: whoever holds the other end of the
pipe may be killed in whatever way."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_input() -> None:
    # Not by sys.stdin, whose lock a process that ends would find taken.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
