"""``python -m tests.hung_steps FILE SECONDS ARGUMENT...`` runs the command line with a device that
hangs in C in every step that begins once there is a file. A step may take SECONDS."""

import ctypes
import runpy
import sys
from pathlib import Path

from harness.host import step_times
from reference.runner import ModelRunner, StepInput, Submission
from tests.serve.engine_child import be_impatient

BEGUN = ".begun"
"""Ends the name of the file that is there once a step hangs."""
SUBMIT = ModelRunner.submit


def main() -> None:
    """Runs the command line."""
    file = Path(sys.argv[1])

    def submit(runner: ModelRunner, inputs: StepInput) -> Submission:
        if file.exists():
            file.with_suffix(BEGUN).touch()
            ctypes.CDLL(None).sleep(10**6)
        return SUBMIT(runner, inputs)

    be_impatient()
    step_times.LEAST_SECONDS = float(sys.argv[2])
    ModelRunner.submit = submit  # type: ignore[method-assign]
    sys.argv = ["zinc-rt", *sys.argv[3:]]
    runpy.run_module("harness", run_name="__main__")


if __name__ == "__main__":
    main()
