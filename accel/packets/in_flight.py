"""Waits for a submitted step without taking a processor core from other work."""

from __future__ import annotations

import time
from typing import Protocol

from contract.lazy_dataclass import dataclass

DEFAULT_TIMEOUT_SECONDS = 600.0
"""Longest a step may take when the caller sets no deadline."""
POLL_SECONDS = 20e-6
SLEPT_SHARE = 0.9
"""Share of a step's usual duration that the host sleeps before it polls."""
MEASURED_STEPS = 4
"""The host only polls for the first steps of a kind: they may take many times as long as later
ones, because kernels are loaded at their first use."""


@dataclass(slots=True)
class Pace:
    """The recent duration of steps of one kind, from which the host decides how long to sleep.
    ``measured`` counts steps since one ended while the host slept, or since the first."""

    seconds: float = 0.0
    measured: int = 0

    @property
    def slept(self) -> float:
        """Seconds that the host sleeps after a step begins."""
        return SLEPT_SHARE * self.seconds if self.measured >= MEASURED_STEPS else 0.0

    def note(self, seconds: float) -> None:
        """Record a step of ``seconds``; slow steps raise the estimate by 5 % at most."""
        self.seconds = min(seconds, self.seconds * 1.05) if self.seconds else seconds
        self.measured += 1

    def missed(self, seconds: float) -> None:
        """Lower the estimate after a step that ended within ``seconds`` while the host slept. Its
        duration is unknown, so the next step is measured."""
        self.seconds = min(seconds, self.seconds * 0.9)
        self.measured = MEASURED_STEPS - 1


class StepCompletion(Protocol):
    """The completion of one step that began no earlier than ``submitted``."""

    @property
    def done(self) -> bool:
        """True once the step has ended."""

    @property
    def submitted(self) -> float:
        """The time of submission, by ``time.monotonic``."""

    @property
    def pace(self) -> Pace:
        """The recent duration of steps of this kind."""


@dataclass(slots=True)
class CompletionWaiter:
    """Waits for the steps of one device, which executes them one after the other."""

    _ended: float = 0.0
    """The end of the last step, by ``time.monotonic``: as observed, or the expected time if that is
    earlier."""
    _known: float = 0.0
    """The time when the host observed the end of the last step."""

    def until_done(self, step: StepCompletion, seconds: float) -> bool:
        """Sleep for most of the step's usual duration, counted from the end of the previous step,
        then poll. Returns False if the step has not ended after ``seconds``."""
        now = time.monotonic()
        deadline, begun, pace = now + seconds, max(step.submitted, self._ended), step.pace
        usual = begun + pace.seconds
        if not step.done:
            ahead = begun + pace.slept - now
            if ahead > 0:
                time.sleep(min(ahead, seconds))
            if not step.done:
                return self._poll(step, deadline, begun)
            if ahead > 0:
                # A sleep takes longer than requested. If that were recorded as the step's duration,
                # the next sleep would be as long, however short the steps are.
                pace.missed(time.monotonic() - begun)
        self._known = time.monotonic()
        self._ended = min(usual, self._known)
        return True

    def _poll(self, step: StepCompletion, deadline: float, begun: float) -> bool:
        while not step.done:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if begun >= self._known:
            step.pace.note(now - begun)
        self._ended = self._known = now
        return True
