"""A clock that moves only when told to."""


class ManualClock:
    """``clock()`` is the time in seconds; a test adds to ``now``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
