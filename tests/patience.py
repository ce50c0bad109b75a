"""How long tests wait for what has to happen: longer than any machine takes for it."""

import threading
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


def wait_for_end(work: Callable[[], object]) -> None:
    """Does ``work``, which must end, and fails where it does not."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "waited for the end of what does not end"
