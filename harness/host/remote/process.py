"""Engines in a child process, so that the interpreter that steps them has no other work."""

from __future__ import annotations

import itertools
import logging
import math
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
from harness.host.remote.channel import Channel, ChannelEnded, ChannelFull
from harness.host.remote.driver import ProcessDriver
from harness.host.remote.messages import ChildAnswer, Ended, Opened, Shown, Start, Step
from harness.host.remote.server import EngineServer
from harness.host.stream_driver import BUFFERED_EVENTS
from harness.host.submissions import EndMessages, EngineStopped
from harness.host.turn_watch import UnheardTime
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
LOADING_SECONDS = 600.0
"""The same while it starts or loads a model, which may hold its interpreter for minutes."""
KILL_SECONDS = 60.0
"""How long a child may go on to hang until it is killed, so that the next request starts another.
Its requests ended when it was taken to hang."""
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
    def hangs(self) -> bool:
        """No thread of this process can."""
        return False

    def end_by(self, at: float) -> None:
        """Take a child to hang that answers nothing END_SECONDS after ``at``; it is killed then."""
        if self._child is not None:
            self._child.end_by = at + END_SECONDS

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
        self.end_by = math.inf
        """From this time on, of ``time.monotonic``, nobody waits for it."""
        self._no_answer = f"the engine's process does not answer; {start.words.remedy} later"
        self._gone = threading.Event()
        self._closing = False
        self._opening, self._counting = 0, threading.Lock()
        self._heard = True
        """Whether it sent something since it was asked for an answer."""
        self._unheard = 0.0
        """For how many seconds it was asked for an answer, and sent nothing."""
        self._ping = -1
        self._hang: str | None = None
        """What it last said of its engines' thread, if that hangs."""
        self._started = False
        self._drivers: dict[str, ProcessDriver] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, SimpleQueue[ChildAnswer | Shown | None]] = {}
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as failed:
            self._channel = Channel(ours)
            failed.callback(self._channel.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path()},
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal is for the server, which ends this process.
                start_new_session=True,
            )
            failed.pop_all()
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._receive, name="engine", daemon=True)
        try:
            with suppress(ChannelEnded):  # Whoever asks it something is told.
                self._channel.send(start)
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
            self._thread.start()
        except BaseException:
            self._gone.set()
            self._channel.close()
            with suppress(ChannelEnded):  # This closes our end, too.
                self._channel.receive()
            self._process.kill()
            self._process.wait()
            raise

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._gone.is_set()

    @property
    def silence(self) -> str | None:
        """See ``SharedDriver.silence``."""
        patience = LOADING_SECONDS if self._opening or not self._started else SILENT_SECONDS
        if self._unheard < patience and time.monotonic() < self.end_by:
            return self._hang
        return self._no_answer

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
        """Have the child call a method of ``EngineServer``. Raises EngineStopped; if the child has
        not read much that was sent, for a submission."""
        with self._ended_as_stopped():
            self._channel.send((method, arguments), method is not EngineServer.submit)

    def ask(self, method: Callable[..., None], *arguments: Any, progress: Progress = SILENT) -> Any:
        """The answer of a method of ``EngineServer``. Raises what it raises, and EngineStopped,
        also if the child hangs."""
        number = self.next_number()
        answers = self._answers[number] = SimpleQueue[ChildAnswer | Shown | None]()
        try:
            if self.ended:
                raise self._reason()
            self._check_silence()
            with self._ended_as_stopped():
                self._channel.send((method, (number, *arguments)))
            while isinstance(answer := self._next(answers), Shown):
                getattr(progress, answer.method)(*answer.arguments)
        finally:
            del self._answers[number]
        if answer is None:
            raise self._reason()
        if answer.error is not None:
            raise answer.error
        return answer.result

    @contextmanager
    def _ended_as_stopped(self) -> Iterator[None]:
        """Raises EngineStopped for ChannelEnded and ChannelFull."""
        try:
            yield
        except ChannelEnded:
            raise self._reason() from None
        except ChannelFull:
            raise EngineStopped(self._no_answer) from None

    def _next(self, answers: SimpleQueue[ChildAnswer | Shown | None]) -> ChildAnswer | Shown | None:
        while True:
            left = self.end_by - time.monotonic()
            try:
                return answers.get(timeout=max(0.0, min(WATCH_SECONDS, left)))
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
        """Ask again and again whether the child answers, and tell all who wait if it does not. In
        the end it is killed."""
        told, unheard, hung = False, UnheardTime(WATCH_SECONDS), UnheardTime(WATCH_SECONDS)
        while not self._gone.is_set():
            if self._heard:
                self._heard, self._ping = False, self.next_number()
                with suppress(ChannelEnded):
                    self._channel.send((EngineServer.ping, (self._ping,)))
            self._gone.wait(WATCH_SECONDS)
            unheard.look(self._heard)
            self._unheard = unheard.seconds
            silence = self.silence
            if silence and not told:
                log.error("the engine's process %d does not answer", self.pid)
                for driver in list(self._drivers.values()):
                    driver.fail_streams(EngineStopped(silence))
            elif told and not silence:
                log.warning("the engine's process %d answers again", self.pid)
            told = silence is not None
            hung.look(not told)
            if hung.seconds >= KILL_SECONDS and self.end_by == math.inf:
                log.error("the engine's process %d is killed; a request starts another", self.pid)
                self._process.kill()
                return

    def close(self) -> None:
        """End the process. All drivers are closed before."""
        self._closing = True
        self._channel.close()
        self._thread.join()

    def _unload(self, driver: ProcessDriver) -> None:
        if not self.ended:
            try:
                self.ask(EngineServer.unload, driver.key)
            except EngineStopped:
                with suppress(EngineStopped):  # It does so once it answers again.
                    self.send(EngineServer.unload, self.next_number(), driver.key)
        self._drivers.pop(driver.key, None)

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                self._heard, self._unheard, self._started = True, 0.0, True
                self._take(message)
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
                case ChildAnswer(number=self._ping):
                    self._hang = message.result
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
