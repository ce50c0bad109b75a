"""The running servers of a user. Each server keeps a small file about itself, which commands read.

A server's load is in the file, so commands need neither its API key nor HTTP. The first command
that finds a file of an ended process removes it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from accel.user_folders import user_folder
from contract.cached_files import remove_abandoned, replacing

if TYPE_CHECKING:
    from harness.serve.run import Running

REFRESH_SECONDS = 0.5
SAME_START_SECONDS = 2.0
"""Two readings of a process's start differ by less; a later process with its id differs by more."""
MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Presence:
    """A running server. ``started``: start of its process in seconds since 1970. ``drain_seconds``:
    how long answers may take after SIGTERM. ``running`` and ``waiting`` count requests."""

    pid: int
    started: float
    url: str
    model: str
    tier: str
    slots: int
    drain_seconds: float
    running: int = 0
    waiting: int = 0
    draining: bool = False

    @property
    def alive(self) -> bool:
        """Whether the process still runs, and its id was not reused."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < SAME_START_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    @property
    def uptime_seconds(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.time() - self.started)


def presence_folder() -> Path:
    """The folder of the files: the user's runtime folder, which others cannot write to."""
    if os.environ.get("XDG_RUNTIME_DIR"):
        return user_folder("runtime") / "servers"
    return user_folder("state") / "servers"


def present(folder: Path | None = None) -> list[Presence]:
    """The running servers, oldest first."""
    found = []
    for path in sorted((folder or presence_folder()).glob("*.json")):
        server = _read(path)
        if server is None or not server.alive:
            with suppress(OSError):
                path.unlink()
        else:
            found.append(server)
    return sorted(found, key=lambda server: server.started)


@contextmanager
def announced(server: Running, drain_seconds: float) -> Iterator[None]:
    """Keep this process's file until the context ends. If it cannot be written, the server is only
    not listed."""
    process = os.getpid()
    started = psutil.Process(process).create_time()
    path = presence_folder() / f"{process}-{server.http.port}.json"
    ended = threading.Event()

    def now() -> Presence:
        model = server.service.model
        statistics = model.driver.statistics
        return Presence(
            pid=process,
            started=started,
            url=server.url,
            model=model.name,
            tier=model.tier,
            slots=model.limits.slots,
            drain_seconds=drain_seconds,
            running=statistics.running,
            waiting=statistics.waiting,
            draining=server.service.draining.is_set(),
        )

    def keep() -> None:
        written = None
        while not ended.is_set():
            if (latest := now()) != written:
                _write(path, latest)
                written = latest
            ended.wait(REFRESH_SECONDS)

    _write(path, now())
    thread = threading.Thread(target=keep, name="presence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            path.unlink()


def _read(path: Path) -> Presence | None:
    """The server that a file describes; None for an unreadable or malformed file."""
    try:
        with path.open("rb") as file:
            server = Presence(**json.loads(file.read(MAX_FILE_BYTES)))
        return server if type(server.pid) is int and server.pid > 0 else None
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, server: Presence) -> None:
    """Replace the file, if that is possible."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_abandoned(path.parent)
        with replacing(path) as file:
            file.write(json.dumps(asdict(server)).encode())
