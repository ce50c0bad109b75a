"""What threads execute is asked for without collecting garbage."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

from contract.garbage import frame_of
from tests.patience import PROCESS_SECONDS

LOOKS = """
import gc, sys, threading, time
from contract.garbage import frame_of

gc.callbacks.append(lambda *_: time.sleep(0.0005))
gc.set_threshold(1, 1, 1)

def start_threads():
    while True:
        started = threading.Thread(target=lambda: None)
        started.start()
        started.join()

threading.Thread(target=start_threads, daemon=True).start()
looks, kept = int(sys.argv[1]), []
while len(kept) < looks:
    kept.append((frame_of(threading.main_thread().ident), [{} for _ in range(3)]))
"""
ROOT = Path(__file__).parents[2]
PACKAGES = ("accel", "contract", "harness", "reference")


def test_nothing_is_collected_meanwhile(monkeypatch) -> None:
    """Whatever a collection calls may wait for a thread that waits for the list of threads."""
    monkeypatch.setattr(sys, "_current_frames", lambda: {7: gc.isenabled()})
    assert frame_of(7) is False
    assert gc.isenabled()


def test_threads_begin_meanwhile() -> None:
    """Which takes the lock of the list of threads, while a collection lets others run."""
    command = [sys.executable, "-c", LOOKS, "200"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=PROCESS_SECONDS)


def test_it_is_the_thread_that_is_named() -> None:
    frame = frame_of(threading.get_ident())
    assert frame is not None
    assert frame.f_code.co_name == "frame_of"
    assert frame_of(0) is None


def test_nothing_else_asks_for_the_frames_of_threads() -> None:
    asks = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "_current_frames" in path.read_text(encoding="utf-8")
    ]
    assert asks == ["contract/garbage.py"]
