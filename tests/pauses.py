"""``ZINC_RT_PAUSES=SEED pytest -p tests.pauses ...``: some functions are late, as on busy machines.

The seed chooses them. Each time one of them begins or ends, whatever thread calls it pauses, a few
times in every test: long enough for other threads to come to where they must not be yet. Whoever
expects that a thread has done something, without waiting for it, is found out."""

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from zlib import crc32

import pytest

ROOT = f"{Path(__file__).parents[1]}{os.sep}"
FOLDERS = tuple(f"{ROOT}{name}{os.sep}" for name in ("harness", "reference", "accel", "tests"))
SEED = int(os.environ.get("ZINC_RT_PAUSES", "0"))
ONE_IN = 60
"""Functions of which one pauses where it begins, and one where it ends."""
MOST = 3
"""Pauses of one of them in a test."""
SECONDS = (0.02, 0.02, 0.05, 0.05, 0.1, 0.7)
"""Also longer than a server waits before it looks whether its client is there."""
SWITCH_SECONDS = 1e-5
_late: dict[tuple[CodeType, str], bool] = {}
_pauses: Counter[tuple[CodeType, str]] = Counter()
_drawn = random.Random(SEED)


def _is_late(code: CodeType, event: str) -> bool:
    place = f"{SEED} {event} {code.co_filename.removeprefix(ROOT)} {code.co_qualname}"
    return code.co_filename.startswith(FOLDERS) and crc32(place.encode()) % ONE_IN == 0


def _pause(frame: FrameType, event: str, argument: object) -> None:
    if event not in ("call", "return"):
        return
    key = frame.f_code, event
    late = _late.get(key)
    if late is None:
        late = _late[key] = _is_late(*key)
    if late and _pauses[key] < MOST:
        _pauses[key] += 1
        time.sleep(_drawn.choice(SECONDS))


def pytest_configure() -> None:
    """Also threads that outlive tests."""
    threading.setprofile(_pause)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """The thread of the test itself; switches are frequent."""
    _pauses.clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.setprofile(_pause)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        sys.setswitchinterval(before)
