"""The thread of an engine: it takes turns, answers others, and says why it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from contract.errors import DeviceLost
from harness.serve.faults import log_fault
from harness.serve.submissions import EngineStopped

T = TypeVar("T")
log = logging.getLogger("zinc_rt.serve")


@dataclass(frozen=True, slots=True)
class EndWords:
    """What callers are told of an engine that was closed, and what to do after a failure."""

    closed: str = "the server is shutting down"
    remedy: str = "restart the server"


def reason_of_end(
    wait: Callable[[], bool],
    turn: Callable[[], None],
    what: str,
    words: EndWords = EndWords(),
) -> EngineStopped:
    """Take turns until ``wait`` says that there are no more, or one fails; what those who wait for
    ``what`` are told then."""
    try:
        while wait():
            turn()
    except DeviceLost as error:
        log.error("the device was lost: %s", error)
        return EngineStopped(f"the device was lost; {words.remedy}")
    except BaseException as error:
        log_fault(f"the {what} ended", error)
        return EngineStopped(f"the {what} failed; {words.remedy}")
    return EngineStopped(words.closed)


def answering(work: Callable[[], T]) -> tuple[Future[T], Callable[[], None]]:
    """What ``work`` will give, its exceptions too, and what another thread calls to do it."""
    future: Future[T] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    return future, carry_out
