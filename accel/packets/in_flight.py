"""Waiting for a step that was submitted, without taking a core from the one who computes it."""

from __future__ import annotations

import time
from typing import Protocol

from contract.lazy_dataclass import dataclass

DEFAULT_TIMEOUT_SECONDS = 600.0
"""Longest a step may take when the caller sets no deadline of its own."""
POLL_SECONDS = 20e-6
SLEPT_SHARE = 0.9
"""Of the usual duration of a step: asking earlier takes a core from who may need it."""


@dataclass(slots=True)
class Pace:
    """How long a step has taken lately, so that the host need not ask before it can be done."""

    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        """One more step took ``seconds``; slow ones count little."""
        self.seconds = min(seconds, self.seconds * 1.05) if self.seconds else seconds

    def missed(self, seconds: float) -> None:
        """One ended while the host slept, within ``seconds``: the host sleeps less from now on."""
        self.seconds = min(seconds, self.seconds * 0.9)


class StepCompletion(Protocol):
    """Completion of one step that began no earlier than ``submitted``."""

    @property
    def done(self) -> bool:
        """True once it has ended."""

    @property
    def submitted(self) -> float:
        """When, by ``time.monotonic``."""

    @property
    def pace(self) -> Pace:
        """That of its kind of step."""


@dataclass(slots=True)
class CompletionWaiter:
    """Waits for the steps of one device, which run one after the other."""

    _ended: float = 0.0
    """When the last step did, by ``time.monotonic``: seen, or as it is usual, which is too early
    rather than too late."""
    _known: float = 0.0
    """When the host saw it."""

    def until_done(self, step: StepCompletion, seconds: float) -> bool:
        """Sleep until ``step`` can be done, which begins when the one before has ended, then ask
        again and again; False when it is not done after ``seconds``."""
        now = time.monotonic()
        deadline, begun, pace = now + seconds, max(step.submitted, self._ended), step.pace
        usual = begun + pace.seconds
        if not step.done:
            ahead = begun + SLEPT_SHARE * pace.seconds - now
            if ahead > 0:
                time.sleep(min(ahead, seconds))
            if not step.done:
                return self._asked(step, deadline, begun)
            if ahead > 0:
                # A sleep takes longer than it was to. Were that taken for the step's duration, the
                # next one would be as long, however short steps are.
                pace.missed(time.monotonic() - begun)
        self._known = time.monotonic()
        self._ended = min(usual, self._known)
        return True

    def _asked(self, step: StepCompletion, deadline: float, begun: float) -> bool:
        while not step.done:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if begun >= self._known:
            step.pace.note(now - begun)
        self._ended = self._known = now
        return True
