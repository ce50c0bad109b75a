"""Virtual time, which passes only when the simulation advances it."""


class VirtualClock:
    """Seconds since the start of a simulation; call it to read it."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.advance_to(self._now + seconds)

    def advance_to(self, moment: float) -> None:
        """Let time pass up to ``moment``; a moment in the past changes nothing."""
        self._now = max(self._now, moment)
