"""Engines that make only the steps a test allows, so that nothing ends before the test has acted.

Any machine may be busy: a test that needs an answer to be under way allows the steps up
to there, acts, and then allows the rest. What engines are asked between steps is done meanwhile.

``python -m tests.held_steps FILE STEPS ARGUMENT...`` runs the command line that way: STEPS steps,
and the others once FILE is gone. Seeds that requests do not name are the same in every run."""

import math
import random
import runpy
import sys
import threading
from pathlib import Path

import pytest

from harness import progress
from harness.serve import engine_requests, listen
from reference.engine import Engine
from tests.patience import PATIENCE_SECONDS

POLL_SECONDS = 0.005
"""How long a step that is not allowed takes, which then made no progress."""
FIRST_SEED = 5
STEP = Engine.step


class HeldSteps:
    """How many steps all engines of this process together may still make."""

    def __init__(self, steps: float) -> None:
        self.left = steps
        self._changed = threading.Condition()

    def allow(self, steps: float = math.inf) -> None:
        """Lets engines make so many steps more; without a number all they need."""
        with self._changed:
            self.left += steps
            self._changed.notify_all()

    def step(self, engine: Engine) -> list[object]:
        """Takes the place of ``Engine.step``."""
        with self._changed:
            self._changed.wait_for(lambda: self.left > 0, POLL_SECONDS)
            if self.left <= 0:
                return []
            self.left -= 1
        return list(STEP(engine))


def hold_steps(monkeypatch: pytest.MonkeyPatch, steps: float = 0) -> HeldSteps:
    """Engines make ``steps`` steps, and more where the result allows them."""
    held = HeldSteps(steps)
    monkeypatch.setattr(Engine, "step", lambda engine: held.step(engine))
    return held


def main() -> None:
    """Runs the command line with engines that are held while a file exists."""
    file, held = Path(sys.argv[1]), HeldSteps(float(sys.argv[2]))

    def step(engine: Engine) -> list[object]:
        if not file.exists():
            held.allow()
        return held.step(engine)

    # What it says depends on no machine: a server that is interrupted says so, however late its
    # threads are, and nobody is told of a file that is long in loading.
    listen.FLUSH_SECONDS = progress.LINE_SECONDS = PATIENCE_SECONDS
    engine_requests.random_bits = random.Random(FIRST_SEED).getrandbits
    Engine.step = step  # type: ignore[assignment, method-assign]
    sys.argv = ["zinc-rt", *sys.argv[3:]]
    runpy.run_module("harness", run_name="__main__")


if __name__ == "__main__":
    main()
