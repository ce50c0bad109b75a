"""Ctrl-C where a process is just being started: it does not run on, forgotten."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from accel.native import compile as native_compile
from harness.catalog import wheel
from harness.progress import SILENT
from tests.patience import POLL_SECONDS, wait_until

SLEEPS = [sys.executable, "-c", "import time; time.sleep(10**6)"]


def compiles(folder: Path) -> None:
    native_compile.run_compiler(SLEEPS, folder, "a library")


def fetches(folder: Path) -> None:
    wheel.download_wheel(wheel.WheelMember("a", "1", "a"), folder, SILENT, 1)


@pytest.mark.parametrize("start", [compiles, fetches])
def test_an_interrupt_within_the_start_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Path], None]
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[Any]):
        def __init__(self, command: object, **options: Any) -> None:
            super().__init__(SLEEPS, **options)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)
            # Where another thread starts it, the main thread has time to be interrupted.
            time.sleep(20 * POLL_SECONDS)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    (pid,) = started
    try:
        wait_until(lambda: not psutil.pid_exists(pid))
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
