"""Engines in a child process, so that the interpreter that steps them has no other work."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from contract.context_manager import ContextManager
from contract.errors import system_errors_as
from contract.types import Tenant
from harness.host.faults import log_fault
from harness.host.hosted import HostedModel
from harness.host.open import chat_template_of
from harness.host.options import SessionOptions
from harness.host.remote.channel import Channel, ChannelEnded
from harness.host.remote.driver import ProcessDriver
from harness.host.remote.messages import ChildAnswer, Ended, Opened, Shown, Start, Step
from harness.host.remote.server import EngineServer
from harness.host.stream_driver import BUFFERED_EVENTS
from harness.host.submissions import EndMessages, EngineStopped
from harness.progress import SILENT, Progress
from harness.startup import python_path
from reference.engine.models import Models
from reference.model.open import open_model

T = TypeVar("T")
P = ParamSpec("P")
MODULE = "harness.host.remote"
END_SECONDS = 10.0
"""How long a child may take to end before it is killed."""
WATCH_SECONDS = 5.0
"""Seconds between two questions whether the child answers."""
SILENT_SECONDS = 20.0
"""How long a child that loads no model may not answer until it is taken to hang. Its interpreter
may be held for seconds; a long step holds it for none."""
WORDS = EndMessages(remedy="send the request again", changed="send the request again")
log = logging.getLogger("zinc_rt.serve")


class EngineProcess(ContextManager):
    """As ``EngineThread``, in a child process, which all models share. A context manager, and
    thread-safe. If the child ends, all its requests do, and the next ``open`` starts another.

    ``tenants`` returns the tenants for a new child; pages of a removed tenant are deleted from the
    folder ``disk_cache``."""

    def __init__(
        self, tenants: Callable[[], Iterable[Tenant]], disk_cache: Path | None = None
    ) -> None:
        self._tenants = tenants
        self._disk_cache = disk_cache
        self._ids = itertools.count(1)
        self._starting = threading.Lock()
        self._child: ChildProcess | None = None
        self._closed = False

    def open(
        self,
        path: Path,
        options: SessionOptions,
        owned: ExitStack,
        progress: Progress = SILENT,
        buffered_events: int = BUFFERED_EVENTS,
    ) -> HostedModel:
        """As ``host_model``. Raises EngineStopped if the child ends meanwhile."""
        model = open_model(path, [adapter.path for adapter in options.lora])
        owned.callback(model.close)
        template = chat_template_of(model, owned) if options.chat else None
        if template is not None:
            template.start()
        child = self._living()
        driver = child.open(path, options, owned, progress, buffered_events)
        return HostedModel.behind(
            driver, model, template, driver.placed, options, owned, driver.trace
        )

    def call(
        self, work: Callable[Concatenate[Models, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        """As ``EngineThread.call``; ``work`` is a function of a module."""
        result: T = self._living().ask(EngineServer.call, None, work, more, named)
        return result

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if none runs."""
        child = self._child
        return None if child is None or child.ended else child.pid

    def close(self) -> None:
        """End the child."""
        with self._starting:
            self._closed = True
            if self._child is not None:
                self._child.close()

    def _living(self) -> ChildProcess:
        """The child, or a new one if it has ended. Raises EngineStopped, and ConfigError if it
        cannot be started."""
        with self._starting:
            if self._closed:
                raise EngineStopped(WORDS.closed)
            if self._child is None or self._child.ended:
                start = Start(
                    tuple(self._tenants()),
                    WORDS,
                    self._disk_cache and self._disk_cache.resolve(),
                    logging.getLogger("zinc_rt.serve").getEffectiveLevel(),
                )
                with system_errors_as("the engine's process cannot be started"):
                    self._child = ChildProcess(start, self._ids)
            return self._child


class ChildProcess:
    """One life of the child. Thread-safe."""

    def __init__(self, start: Start, ids: Iterator[int]) -> None:
        self.ids = ids
        self.words = start.words
        self._gone = threading.Event()
        self._closing = False
        self._opening, self._counting = 0, threading.Lock()
        self._asked: float | None = None
        """When it was asked what it has not answered yet."""
        self._drivers: dict[str, ProcessDriver] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, SimpleQueue[ChildAnswer | Shown | None]] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path()},
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal is for the server, which ends this process.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._channel = Channel(ours)
        with suppress(ChannelEnded):  # Whoever asks it something is told.
            self._channel.send(start)
        self._thread = threading.Thread(target=self._receive, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._gone.is_set()

    @property
    def silence(self) -> str | None:
        """See ``SharedDriver.silence``."""
        asked = self._asked
        if asked is None or self._opening or time.monotonic() - asked < SILENT_SECONDS:
            return None
        return f"the engine's process does not answer; {self.words.remedy} later"

    def open(
        self,
        path: Path,
        options: SessionOptions,
        owned: ExitStack,
        progress: Progress,
        buffered_events: int,
    ) -> ProcessDriver:
        """Open a model; ``owned`` unloads it."""
        with self._loading():
            opened: Opened = self.ask(
                EngineServer.open,
                path.resolve(),
                replace(options, chat=False),
                buffered_events,
                progress=progress,
            )
        driver = ProcessDriver(self, opened, buffered_events)
        self._drivers[driver.key] = driver
        if self.ended:
            driver.end(self._reason())
        owned.callback(self._unload, driver)
        return driver

    def next_number(self) -> int:
        """A number for a question."""
        return next(self._numbers)

    def send(self, method: Callable[..., None], *arguments: Any) -> None:
        """Have the child call a method of ``EngineServer``. Raises EngineStopped."""
        try:
            self._channel.send((method, arguments))
        except ChannelEnded:
            raise self._reason() from None

    def ask(self, method: Callable[..., None], *arguments: Any, progress: Progress = SILENT) -> Any:
        """The answer of a method of ``EngineServer``. Raises what it raises, and EngineStopped,
        also if the child hangs."""
        number = self.next_number()
        answers = self._answers[number] = SimpleQueue[ChildAnswer | Shown | None]()
        try:
            if self.ended:
                raise self._reason()
            self._check_silence()
            self.send(method, number, *arguments)
            while isinstance(answer := self._next(answers), Shown):
                getattr(progress, answer.method)(*answer.arguments)
        finally:
            del self._answers[number]
        if answer is None:
            raise self._reason()
        if answer.error is not None:
            raise answer.error
        return answer.result

    def _next(self, answers: SimpleQueue[ChildAnswer | Shown | None]) -> ChildAnswer | Shown | None:
        while True:
            try:
                return answers.get(timeout=WATCH_SECONDS)
            except Empty:
                self._check_silence()

    def _check_silence(self) -> None:
        silence = self.silence
        if silence is not None:
            raise EngineStopped(silence)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Loading may hold the child's interpreter for longer than SILENT_SECONDS."""
        with self._counting:
            self._opening += 1
        try:
            yield
        finally:
            with self._counting:
                self._opening -= 1

    def _watch(self) -> None:
        """Ask again and again whether the child answers. The first answer may take as long as
        Python takes to start."""
        started = False
        while not self._gone.wait(WATCH_SECONDS if started else 0.0):
            number, told = self.next_number(), False
            answers = self._answers[number] = SimpleQueue[ChildAnswer | Shown | None]()
            self._asked = time.monotonic() if started else None
            with suppress(EngineStopped):
                self.send(EngineServer.ping, number)
            while not self._gone.is_set():
                with suppress(Empty):
                    answers.get(timeout=WATCH_SECONDS)
                    break
                if self.silence and not told:
                    log.error("the engine's process %d does not answer", self.pid)
                    told = True
            del self._answers[number]
            self._asked, started = None, True
            if told and not self.ended:
                log.warning("the engine's process %d answers again", self.pid)

    def close(self) -> None:
        """End the process. All drivers are closed before."""
        self._closing = True
        self._channel.close()
        self._thread.join()

    def _unload(self, driver: ProcessDriver) -> None:
        if not self.ended:
            with suppress(EngineStopped):
                self.ask(EngineServer.unload, driver.key)
        self._drivers.pop(driver.key, None)

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._channel.receive())
        except ChannelEnded:
            pass
        except Exception as error:
            log_fault("a message of the engine's process cannot be read", error)
        self._end()

    def _take(self, message: object) -> None:
        try:
            match message:
                case Step(key=key) if key in self._drivers:
                    self._drivers[key].received(message)
                case Ended(key=key, reason=reason) if key in self._drivers:
                    self._drivers[key].end(EngineStopped(reason))
                case ChildAnswer(number=number) | Shown(number=number) if number in self._answers:
                    self._answers[number].put(message)
        except Exception as error:
            log_fault("a step's results failed", error)

    def _end(self) -> None:
        """End all that waits for the child, which is gone."""
        self._gone.set()
        self._channel.close()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if not self._closing:
            log.error("the engine's process %d ended: %s", self.pid, _how(code))
        for driver in list(self._drivers.values()):
            driver.end(self._reason())
        for answers in list(self._answers.values()):
            answers.put(None)

    def _reason(self) -> EngineStopped:
        words = self.words
        return EngineStopped(
            words.closed if self._closing else f"the engine's process ended; {words.remedy}"
        )


def _how(code: int) -> str:
    """How a process ended."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
