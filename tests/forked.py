"""Work in a fork of the test process."""

import gc
import multiprocessing
import os
from collections.abc import Callable

from tests.patience import PATIENCE_SECONDS


def in_a_fork(work: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> object:
    """What ``work`` gives within so many seconds, or the text of what it raises.

    The copy collects no garbage and ends at once: what other tests left in this process, libraries
    with threads of their own among it, cannot be freed or ended by a process without the threads.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        gc.disable()
        try:
            sender.send(work())
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")
        os._exit(0)

    child = context.Process(target=run)
    child.start()
    assert receiver.poll(seconds)
    result = receiver.recv()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == 0
    return result
