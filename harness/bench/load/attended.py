"""``python -m harness.bench.load.attended MODULE WORD...``: run ``python -m MODULE WORD...`` and
send it SIGTERM when standard input ends. So the module ends with the process that holds the other
end of the pipe, however that is killed."""

import os
import runpy
import signal
import sys
import threading


def _end_with_input() -> None:
    # Read the descriptor, since a process that ends could not take the lock of sys.stdin.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
