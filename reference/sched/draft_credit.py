"""Accounts, in seconds, that limit what drafts may lose: they pay for rounds that are slower than
plain steps, for trials, and for what a draft block reads."""

from __future__ import annotations

import math

from contract.lazy_dataclass import dataclass

CREDIT_STEPS = 7.0
"""The largest credit of the account, in plain steps."""
BATCH_CREDIT_STEPS = 64.0
"""The largest credit of the second account, in plain steps. It pays for smaller batches: drafts
make sequences of one batch end at different times."""
FIRST_CREDIT_STEPS = 2.0
"""The credit at first, in plain steps."""


@dataclass(slots=True)
class DraftCredit:
    """The credit of ``all`` rounds, and of those that several sequences share (``batch``). It is
    ``opened`` once plain steps were measured; what comes before is charged then."""

    all: float = 0.0
    batch: float = 0.0
    opened: bool = False

    def open(self, plain: float) -> None:
        """Begin with a few plain steps of ``plain`` seconds."""
        if not self.opened:
            self.opened = True
            self.all += FIRST_CREDIT_STEPS * plain
            self.batch += FIRST_CREDIT_STEPS * plain

    def earn(self, seconds: float, plain: float | None) -> None:
        """Add ``seconds``, which may be negative. A plain step takes ``plain``."""
        self.all = min(_most(CREDIT_STEPS, plain), self.all + seconds)

    def earn_batch(self, seconds: float, plain: float | None) -> None:
        """The same for the second account."""
        self.batch = min(_most(BATCH_CREDIT_STEPS, plain), self.batch + seconds)

    def of(self, running: int) -> float:
        """The credit for a round of ``running`` sequences."""
        return self.all if running == 1 else min(self.all, self.batch)


def _most(steps: float, plain: float | None) -> float:
    return math.inf if plain is None else steps * plain
