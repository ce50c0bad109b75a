"""``python -m tests.hung_steps FILE SECONDS ARGUMENT...`` runs the command line with a device that
hangs in C in every step that begins once there is a file. Such a step may take SECONDS."""

import ctypes
import runpy
import sys
from pathlib import Path

from harness.serve import listen
from reference.runner import ModelRunner, StepInput, Submission
from tests.patience import PATIENCE_SECONDS
from tests.serve.engine_child import be_watchful, impatience

BEGUN = ".begun"
"""Ends the name of the file that is there once a step hangs."""
SUBMIT = ModelRunner.submit


def main() -> None:
    """Runs the command line."""
    file, seconds = Path(sys.argv[1]), float(sys.argv[2])

    def submit(runner: ModelRunner, inputs: StepInput) -> Submission:
        if file.exists():
            with impatience(seconds):
                file.with_suffix(BEGUN).touch()
                ctypes.CDLL(None).sleep(10**6)
        return SUBMIT(runner, inputs)

    be_watchful()
    listen.FLUSH_SECONDS = PATIENCE_SECONDS
    ModelRunner.submit = submit  # type: ignore[method-assign]
    sys.argv = ["zinc-rt", *sys.argv[3:]]
    runpy.run_module("harness", run_name="__main__")


if __name__ == "__main__":
    main()
