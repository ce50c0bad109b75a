"""Processes that keep cores busy during a measurement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""A program that computes until it is ended or its parent is gone; it ignores Ctrl-C, which the
parent handles."""


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Run ``count`` processes that compute all the time; yields their process ids.

    They end with the block, however it is left, and also when this process is killed."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-I", "-S", "-c", SPIN]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
