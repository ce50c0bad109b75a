"""How long tests wait for what has to happen: longer than any machine takes for it."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0
PROCESS_SECONDS = 8 * PATIENCE_SECONDS
"""For a process that ends by itself: it may compile, on a tenth of a core."""
POLL_SECONDS = 0.005


def wait_until(true: Callable[[], bool]) -> None:
    """Waits until something comes true, and fails where it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "waited for what did not happen"
        time.sleep(POLL_SECONDS)
