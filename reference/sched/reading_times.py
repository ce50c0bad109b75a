"""Seconds that a drafter adds to steps without drafts. It reads the tokens of the sequences that it
follows, and the model keeps their hidden states for a draft block."""

from __future__ import annotations

from reference.sched.cost import Load, StepCost
from reference.sched.plain_times import MedianTime

BLOCK_SHARE = 0.05
"""The assumed time in which the block reads tokens, as a part of the model's for as many, until it
was measured."""
KEPT_STATES_SHARE = 0.01
"""The assumed part of a plain step that it takes longer if hidden states are kept."""
SAMPLES_MIN = 1
"""The number of measured readings whose median is used."""


class ReadingTimes:
    """The time of tokens read beside plain steps: a median of what was measured, and before that a
    part of what ``cost`` predicts for a prompt."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._token = MedianTime()

    def note(self, tokens: int, seconds: float) -> None:
        """Record a step that took ``seconds`` more because ``tokens`` tokens were read."""
        self._token.add(max(seconds, 0.0) / tokens, 0.0)

    def seconds(self, tokens: int) -> float:
        """Expected seconds of reading ``tokens`` tokens."""
        if tokens <= 0 or not self._cost.total:
            return 0.0
        if len(self._token.latest) >= SAMPLES_MIN:
            return tokens * self._token.seconds
        return BLOCK_SHARE * (self._cost.predict(Load(tokens, 0)) or 0.0)
