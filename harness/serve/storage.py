"""Files that a server has to write before it may answer: what happens while it cannot."""

from __future__ import annotations

import logging
import time

from contract.errors import ZincError

RETRY_SECONDS = 1.0
"""How long after a failure it is tried again."""
LOG_SECONDS = 60.0
log = logging.getLogger("zinc_rt.serve")


class StorageProblem(ZincError):
    """A file cannot be written now; ``full`` says that its disk has no room."""

    def __init__(self, problem: str, full: bool) -> None:
        self.full = full
        super().__init__(problem)


class ProblemLog:
    """One line a minute of a problem that goes on, and one at its end."""

    def __init__(self) -> None:
        self._logged: float | None = None

    def note(self, problem: str | None) -> None:
        """There is this problem now, or none."""
        now = time.monotonic()
        if problem is None:
            if self._logged is not None:
                log.warning("storage can be written again")
            self._logged = None
        elif self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.error("new requests are refused: %s", problem)
