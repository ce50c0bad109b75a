"""Facts about this machine: processor, memory bandwidth, and how busy its cores are; and processes
that keep cores busy during a measurement."""

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import threadpoolctl

from contract.processors import processor_name, processors

STREAM_BYTES = 1 << 28
"""Bytes of the copied array, far beyond any cache."""
STREAM_ROUNDS = 3


def machine_facts() -> dict[str, Any]:
    """The processor, usable cores, bytes of memory, load, and numpy version."""
    blas = [
        f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'unknown')})"
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return {
        "cpu": processor_name(),
        "cores": processors(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas,
    }


def stream_bandwidth(threads: int, nbytes: int = STREAM_BYTES) -> float:
    """Bytes per second that a numpy copy reads and writes, the best of a few rounds.

    ``threads`` threads copy one part each; every byte copied counts twice."""
    source = np.ones(nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(STREAM_ROUNDS):
            started = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))
            best = max(best, 2 * nbytes / (time.perf_counter() - started))
    return best


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
