"""Work that other threads ask the thread of the engines for, and why it does none any more."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

from contract.errors import DeviceLost
from harness.host import turn_watch
from harness.host.faults import log_fault
from harness.host.submissions import EndMessages, EngineStopped

T = TypeVar("T")
log = logging.getLogger("zinc_rt.serve")


def answering(
    work: Callable[[], T], silence: Callable[[], str | None]
) -> tuple[Callable[[], T], Callable[[], None]]:
    """A function that waits for the result of ``work``, and a function that another thread calls to
    compute it. Unlike a future, a queue has no lock that Ctrl-C could leave locked.

    The wait ends with EngineStopped once ``silence`` says what to say of a thread that hangs; then
    work that was not begun never is. So does this function if it hangs already."""
    problem = silence()
    if problem is not None:
        raise EngineStopped(problem)
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()
    left = deque([None])

    def carry_out() -> None:
        try:
            left.pop()
        except IndexError:
            return
        try:
            result = work()
        except BaseException as error:
            results.put(partial(_raise, error))
        else:
            results.put(lambda: result)

    def wait() -> T:
        while True:
            try:
                answer = results.get(timeout=turn_watch.WATCH_SECONDS)
            except Empty:
                problem = silence()
                if problem is not None:
                    left.clear()
                    raise EngineStopped(problem) from None
            else:
                return answer()

    return wait, carry_out


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error


def reason_of_end(
    wait: Callable[[], bool], turn: Callable[[], None], words: EndMessages
) -> EngineStopped:
    """Call ``turn`` until ``wait`` returns False or an error occurs. Returns the error for
    clients."""
    try:
        while wait():
            turn()
    except DeviceLost as error:
        log.error("the device was lost: %s", error)
        return EngineStopped(f"the device was lost; {words.remedy}")
    except BaseException as error:
        log_fault("the engine ended", error)
        return EngineStopped(f"the engine failed; {words.remedy}")
    return EngineStopped(words.closed)
