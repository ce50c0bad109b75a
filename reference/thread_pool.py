"""Pools of threads that a whole process shares."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


def thread_pool(name: str, threads: int) -> ThreadPoolExecutor:
    """The pool called ``name`` of this process, of at most ``threads`` threads.

    A fork has none of its parent's threads, so it gets a pool of its own."""
    return _pool(os.getpid(), name, threads)


@cache
def _pool(process: int, name: str, threads: int) -> ThreadPoolExecutor:
    # This import takes a hundredth of the start of a process that needs no pool.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, thread_name_prefix=name)
