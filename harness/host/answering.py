"""Work that one thread posts and another does, while the first waits for its result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NoReturn, TypeVar

T = TypeVar("T")


def answering(work: Callable[[], T]) -> tuple[Callable[[], T], Callable[[], None]]:
    """The function that waits for the result of ``work``, and the one that another thread calls to
    do it. Unlike a future, a queue has no lock that Ctrl-C could leave locked."""
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def carry_out() -> None:
        try:
            result = work()
        except BaseException as error:
            results.put(partial(_raise, error))
        else:
            results.put(lambda: result)

    return lambda: results.get()(), carry_out


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error
