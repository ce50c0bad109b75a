"""The process of engines that serve another process: opens models, and runs what it is sent.

``python -m harness.host.remote FD`` is such a process; FD is its end of the channel. It ends when
the other end is closed, at once, so that no device stays busy for nobody."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from contract.errors import ZincError
from harness.host.disk import forgetting
from harness.host.engine_thread import EngineThread
from harness.host.faults import log_fault
from harness.host.heap import freeze_heap
from harness.host.hosted import HostedModel, host_model
from harness.host.options import SessionOptions
from harness.host.remote.channel import Channel, ChannelEnded
from harness.host.remote.messages import ChildAnswer, Opened, Shown, Start, Step
from harness.host.remote.step_driver import StepDriver
from harness.host.remote.work import Job, Work
from harness.host.submissions import EngineStopped
from harness.unblocked import unblock_standard_error

FAILED = 70
"""Exit code after the thread of the engines failed: sysexits.h's for an internal fault."""
COMPILING = 4
"""Most grammars that are compiled at once."""
SPARE = 4
"""Threads for what must be done though the system refuses threads: an answer to the other process,
a drain, another one that ends it, and an unload."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
log = logging.getLogger("zinc_rt.serve")


class EngineServer:
    """The engines of this process. The other process calls its public methods, none of which
    waits."""

    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._words = start.words
        self._thread = EngineThread(
            start.tenants,
            start.words,
            forgetting(start.disk_cache),
            partial(StepDriver, self._send),
        )
        self._models: dict[str, tuple[HostedModel, StepDriver, ExitStack]] = {}
        self._compiling = _Threads(COMPILING, "grammars")
        self._spare = _Threads(SPARE, "spare")
        self._prepared: dict[int, bool] = {}
        """Requests whose grammars are compiled; True for those that are cancelled."""
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do what the other process asks for until it closes its end."""
        watch = threading.Thread(target=self._end_with_the_thread, daemon=True)
        watch.start()
        with suppress(ChannelEnded):
            while True:
                method, arguments = self._channel.receive()
                method(self, *arguments)

    def ping(self, number: int) -> None:
        """Answer whether the thread of the engines hangs, without it."""
        self._spare.submit(partial(self._send, ChildAnswer(number, None, self._thread.silence)))

    def open(self, number: int, path: Path, options: SessionOptions, buffered_events: int) -> None:
        """ChildAnswer ``number`` with a model that was loaded."""
        self._in_thread(number, partial(self._open, number, path, options, buffered_events))

    def unload(self, number: int, key: str) -> None:
        """Free a model, and answer."""
        self._in_thread(number, partial(self._unload, key), needed=True)

    def close(self, number: int, key: str, drain_seconds: float) -> None:
        """Close a driver, and answer."""
        self._in_thread(number, lambda: self._driver(key).close(drain_seconds), needed=True)

    def call(
        self,
        number: int,
        key: str | None,
        work: Callable[..., Any],
        more: Sequence[Any],
        named: Mapping[str, Any],
    ) -> None:
        """ChildAnswer with the result of ``work``, called with an engine, or with all for None."""

        def answer() -> Any:
            engines = self._thread if key is None else self._driver(key)
            return engines.call(work, *more, **named)

        self._in_thread(number, answer)

    def submit(self, key: str, number: int, groups: Sequence[Sequence[Work]]) -> None:
        """Submit groups of requests; see ``StepDriver.accept``."""
        ids = [work.request.id for group in groups for work in group if work.grammar is not None]
        if not ids:
            self._accept(key, number, groups)
            return
        with self._lock:
            self._prepared |= dict.fromkeys(ids, False)
        self._compiling.submit(partial(self._accept, key, number, groups))

    def cancel(
        self, key: str, request_ids: Sequence[int], used: int | None, complete: bool
    ) -> None:
        """Cancel requests; with ``complete`` as ``EventStream.end`` does."""
        if self._prepared:
            with self._lock:
                for number in self._prepared.keys() & set(request_ids):
                    self._prepared[number] = True
        found = self._models.get(key)
        if found is not None:
            driver = found[1]
            if complete:
                driver.stream._complete.update(request_ids)
            driver.cancel(driver.stream, request_ids, used=used)

    def stall(self, key: str, request_ids: Sequence[int]) -> None:
        """See ``StepDriver``."""
        found = self._models.get(key)
        if found is not None:
            found[1].stall(request_ids)

    def resume(self, key: str, request_ids: Sequence[int]) -> None:
        """See ``StepDriver``."""
        found = self._models.get(key)
        if found is not None:
            found[1].resume(request_ids)

    def _model(self, key: str) -> tuple[HostedModel, StepDriver, ExitStack]:
        found = self._models.get(key)
        if found is None:
            raise EngineStopped(self._words.closed)
        return found

    def _driver(self, key: str) -> StepDriver:
        return self._model(key)[1]

    def _open(
        self, number: int, path: Path, options: SessionOptions, buffered_events: int
    ) -> Opened:
        owned = ExitStack()
        try:
            hosted = host_model(
                path,
                options,
                self._thread,
                owned,
                _ShownElsewhere(number, self._send),
                buffered_events=buffered_events,
            )
        except BaseException:
            owned.close()
            raise
        driver = hosted.driver
        assert isinstance(driver, StepDriver)
        self._models[driver.key] = hosted, driver, owned
        freeze_heap()
        return Opened(driver.key, hosted.placement, hosted.traced is not None, driver.status())

    def _unload(self, key: str) -> None:
        found = self._models.pop(key, None)
        if found is not None:  # It may be asked for twice.
            found[2].close()
            freeze_heap()

    def _accept(self, key: str, number: int, groups: Sequence[Sequence[Work]]) -> None:
        """Make the jobs of a submission and submit them, unless they were cancelled meanwhile."""
        try:
            hosted, driver, _ = self._model(key)
            jobs = [[Job(work, hosted.grammars) for work in group] for group in groups]
            ids = [job.request.id for group in jobs for job in group]
            with self._lock:
                cancelled = [one for one in ids if self._prepared.pop(one, False)]
                driver.accept(number, jobs)
            if cancelled:
                driver.cancel(driver.stream, cancelled)
        except Exception as error:
            with self._lock:
                for group in groups:
                    for work in group:
                        self._prepared.pop(work.request.id, None)
            refusal = _sendable(error)
            # Not on this thread, which receives: it must never wait for the other process.
            answer = Step(key, 0.0, answers=[(number, [refusal] * len(groups))])
            self._spare.submit(partial(self._send, answer))

    def _in_thread(self, number: int, work: Callable[[], Any], needed: bool = False) -> None:
        """ChildAnswer with the result of ``work``, or with its error. ``needed`` work is done even
        if the system refuses a thread."""

        def answer() -> None:
            try:
                answered = ChildAnswer(number, None, work())
            except BaseException as error:
                answered = ChildAnswer(number, _sendable(error))
            try:
                self._send(answered)
            except Exception as error:
                self._send(ChildAnswer(number, _sendable(error)))

        try:
            threading.Thread(target=answer, name="question", daemon=True).start()
        except RuntimeError as error:
            refused = ChildAnswer(number, EngineStopped(f"{error}; {self._words.remedy} later"))
            self._spare.submit(answer if needed else partial(self._send, refused))

    def _send(self, message: object) -> None:
        with suppress(ChannelEnded):
            self._channel.send(message)

    def _end_with_the_thread(self) -> None:
        """End this process when the thread of the engines does, which then has told why."""
        self._thread.wait()
        os._exit(FAILED)


class _Threads:
    """Threads that start now: later the system may refuse them."""

    def __init__(self, count: int, name: str) -> None:
        self._work = SimpleQueue[Callable[[], None]]()
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        """Do ``work``, which raises nothing, on a thread that is free."""
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()


class _ShownElsewhere:
    """Shows progress in the other process."""

    def __init__(self, number: int, send: Callable[[object], None]) -> None:
        self._number = number
        self._send = send

    def start(self, label: str, total: int | None, unit: str) -> None:
        self._send(Shown(self._number, "start", (label, total, unit)))

    def advance(self, n: int) -> None:
        self._send(Shown(self._number, "advance", (n,)))

    def close(self) -> None:
        self._send(Shown(self._number, "close"))


def _sendable(error: BaseException) -> Exception:
    """The error for the other process; of a fault it gets no more than that there was one."""
    if isinstance(error, ZincError | OSError | ValueError):
        return error
    log_fault("the engine's process failed", error)
    return EngineStopped("the engine failed; the server's log says where")


def main(descriptor: int) -> None:
    """Serve the process at the other end of the socket ``descriptor``."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        # The other process decides when this one ends. A handler is not inherited, unlike SIG_IGN.
        signal.signal(number, lambda *_: None)
    channel = Channel(connection, waits=True)
    try:
        start: Start = channel.receive()
    except ChannelEnded:
        return
    unblock_standard_error()
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("zinc_rt.serve").setLevel(start.log_level)
    EngineServer(channel, start).run()
    os._exit(0)
