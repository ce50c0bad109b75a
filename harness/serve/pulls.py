"""Downloads models into the cache, each in its own thread. Clients can follow the progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from contract.errors import CatalogError, ZincError
from harness import catalog
from harness.host.faults import log_fault
from harness.serve.answers import Json
from harness.serve.data_lines import DONE, PING, data_line
from harness.serve.errors import RESTART_SECONDS, ApiError, internal_error
from harness.serve.streams import PING_SECONDS

MAX_PULLS = 2
"""Most models pulled at the same time."""
PROGRESS_SECONDS = 0.1
"""Least time between two states that are yielded."""
END_SECONDS = 10.0
"""Longest wait for the end of a pull that is given up."""


class _GivenUp(ZincError):
    """Ends the thread of a pull."""


class Pull:
    """The pull of one model. It is the ``harness.progress.Progress`` of its own thread; other
    threads read its ``state``."""

    def __init__(self, name: str, cache_dir: Path) -> None:
        self.name = name
        self.error: ApiError | None = None
        self._cache_dir = cache_dir
        self._changed = threading.Condition()
        self._given_up = False
        self._status = "looking"
        self._completed = 0
        self._total: int | None = None
        self._version = 0
        self.thread = threading.Thread(target=self._run, name="pull", daemon=True)

    @property
    def ended(self) -> bool:
        """Whether it is done or has failed."""
        return self._status in ("done", "failed")

    @property
    def state(self) -> Json:
        """The progress: ``status`` is looking, waiting, downloading, verifying, done or failed;
        ``completed`` of ``total`` bytes, null if unknown."""
        return {
            "model": self.name,
            "status": self._status,
            "completed": self._completed,
            "total": self._total,
        }

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a part of the work. The first word of its label becomes the status."""
        self._report(label.partition(" ")[0], 0, total)

    def advance(self, n: int) -> None:
        """Count more bytes of the current part."""
        self._report(self._status, self._completed + n, self._total)

    def close(self) -> None:
        """End the current part."""

    def give_up(self) -> None:
        """End the pull at its next progress report. Does nothing after its end."""
        self._given_up = True

    def states(self, interval: float = PING_SECONDS) -> Iterator[Json | None]:
        """Yield every new state up to the last one; None after ``interval`` seconds without a new
        one."""
        seen = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=seen: self._version != at, interval)  # type: ignore[misc]
                fresh, seen = self._version != seen, self._version
                state = self.state
            yield state if fresh else None
            if state["status"] in ("done", "failed"):
                return
            time.sleep(PROGRESS_SECONDS)

    def _report(self, status: str, completed: int, total: int | None) -> None:
        """Set the state. Raises _GivenUp if the pull is given up."""
        if self._given_up:
            raise _GivenUp("given up")
        self._note(status, completed, total)

    def _note(self, status: str, completed: int, total: int | None) -> None:
        with self._changed:
            self._status, self._completed, self._total = status, completed, total
            self._version += 1
            self._changed.notify_all()

    def _run(self) -> None:
        status = "failed"
        try:
            catalog.pull(catalog.find_model(self.name), self._cache_dir, self)
            status = "done"
        except _GivenUp:
            self.error = ApiError(410, f"the pull of {self.name} was given up", code="given_up")
        except CatalogError as error:
            self.error = ApiError(502, str(error), param="model", code="pull_failed", retry=False)
        except Exception as error:
            log_fault("a pull failed", error)
            self.error = internal_error()
        self._note(status, self._completed, self._total)


class Pulls:
    """The pulls of a server into the folder ``cache_dir``."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._lock = threading.Lock()
        self._pulls: dict[str, Pull] = {}

    def states(self) -> dict[str, Json]:
        """The state of every pull in flight, by model."""
        with self._lock:
            return {name: pull.state for name, pull in self._pulls.items() if not pull.ended}

    def begin(self, name: str) -> Pull:
        """The pull of a model: the one in flight, or a new one. Raises ApiError 503 if MAX_PULLS
        other models are being pulled."""
        with self._lock:
            self._pulls = {name: pull for name, pull in self._pulls.items() if not pull.ended}
            pull = self._pulls.get(name)
            if pull is not None:
                return pull
            if len(self._pulls) >= MAX_PULLS:
                raise ApiError(
                    503,
                    f"{MAX_PULLS} models are being pulled; wait for one of them",
                    code="too_many_pulls",
                    retry_after=RESTART_SECONDS,
                    retry=False,
                )
            pull = self._pulls[name] = Pull(name, self._cache_dir)
            pull.thread.start()
            return pull

    def give_up(self, name: str) -> bool:
        """End the pull of a model and wait for its thread. Returns whether there was one."""
        with self._lock:
            pull = self._pulls.get(name)
        if pull is None or pull.ended:
            return False
        pull.give_up()
        pull.thread.join(END_SECONDS)
        return True

    def close(self) -> None:
        """End all pulls. Verified parts stay for the next pull."""
        with self._lock:
            pulls = list(self._pulls.values())
        for pull in pulls:
            pull.give_up()
        for pull in pulls:
            pull.thread.join(END_SECONDS)


def pull_stream(pull: Pull) -> Iterator[bytes]:
    """The progress of a pull as server-sent events: ``[DONE]`` when complete, an error line if it
    failed."""
    for state in pull.states():
        if state is None:
            yield PING
        elif state["status"] != "failed":
            yield data_line(msgspec.json.encode(state))
    yield DONE if pull.error is None else data_line(pull.error.encoded())


def pull_whole(pull: Pull) -> Json:
    """The last state of a pull. Raises ApiError if it failed."""
    pull.thread.join()
    if pull.error is not None:
        raise pull.error
    return pull.state
