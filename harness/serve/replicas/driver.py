"""A driver like ``ThreadedDriver`` whose engines are replicas under Ray Serve.

If a replica dies, another one continues its requests from the tokens they have. The stream of
events is the same as without the failure."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from contract.errors import QueueFull, RequestError, ZincError
from harness.host.event_queue import EventQueue, Offer, TimedEvent
from harness.host.faults import log_fault
from harness.host.memory_state import MemoryState
from harness.host.remote.receivers import Receivers
from harness.host.submissions import EngineStopped, Submission, Submits
from harness.host.watch import Listener, RequestFacts
from harness.serve.replicas.router import PrefixRouter, stopped_lately
from harness.serve.replicas.sums import summed
from harness.serve.replicas.work import AnswerEnd, Question, Refusal, RequestUpdate
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics

T = TypeVar("T")
P = ParamSpec("P")
MAX_MOVES = 8
"""How often a request may move to another replica."""
MOVE_SECONDS = 0.25
"""How long a request waits for Ray to notice that a replica died."""
ANSWER_SECONDS = 30.0
log = logging.getLogger("zinc_rt.serve")


class _Pump:
    """A thread that moves the events of one request from its replica to a queue."""

    def __init__(self, driver: ReplicatedDriver, receivers: Receivers, facts: RequestFacts) -> None:
        self.request = receivers.work.request
        self.taken: Future[None] = Future()
        self.cancelled = False
        self._driver = driver
        self._receivers = receivers
        self._facts = facts
        self._tokens: list[int] = []
        self._begun = ("", 0)
        """The replica that computes now, and the tokens that were known before it began. The thread
        of this object writes both at once, and any other may read them."""
        self._used: int | None = None
        self._ended = False
        self._response: Any = None
        self._stopped: EngineStopped | None = None
        """Why the engine of the last replica stopped, if that is why it was left."""
        self.events = EventQueue()

    def run(self) -> None:
        """Follow the request until it ends, is cancelled, or has lost too many replicas."""
        try:
            for _ in range(MAX_MOVES):
                if self._follow():
                    return
                time.sleep(MOVE_SECONDS)
            lost = EngineStopped("no replica lives long enough; look at the server's log")
            self._fail(self._stopped or lost)
        except (TaskCancelledError, RayServeException):
            self._fail(EngineStopped("the server is shutting down"))
        except Exception as error:
            log_fault("a replica failed", error)
            self._fail(EngineStopped("a replica failed; the server's log says where"))
        finally:
            self._driver.forget(self)

    def cancel(self, used: int | None = None) -> None:
        """Cancel the request. If its answer has ``used`` tokens, no later ones are counted."""
        self._used = used
        self.cancelled = True
        if self._response is not None:
            self._response.cancel()
        self._end_answer()

    def _end_answer(self) -> None:
        """Tell the replica how many tokens its part of a cancelled answer has. Tokens of a dead
        replica are not counted."""
        used, (replica, before) = self._used, self._begun
        if used is not None and replica:
            own = max(0, used - before)
            self._driver.end_answer(AnswerEnd(replica, self.request.id, own))

    def _follow(self) -> bool:
        """Follow one replica. Returns whether the request is finished."""
        work = replace(self._receivers.work, tokens=tuple(self._tokens))
        before = len(self._tokens)
        self._begun = ("", before)
        try:
            self._response = self._driver.handle.generate.remote(work)
            for update in self._response:
                if not isinstance(update, Refusal):
                    self._begun = (update.replica, before)
                if self.cancelled:
                    # ``cancel`` may not have known the replica yet.
                    self._response.cancel()
                    self._end_answer()
                    return True
                if isinstance(update, Refusal):
                    return self._refused(update)
                self._receive(update)
        except RayActorError:
            log.warning(
                "replica %s is gone: a request goes on elsewhere after %d tokens",
                self._begun[0] or "none",
                len(self._tokens),
            )
        return self._ended or self.cancelled

    def _receive(self, batch: RequestUpdate) -> None:
        now = time.monotonic()
        if not self.taken.done():
            self.taken.set_result(None)
        self._driver.heard(batch)
        self._facts.preempted = max(self._facts.preempted, batch.preempted)
        if batch.admitted and not self._tokens:
            self._facts.admitted = self._facts.admitted or now
            self._facts.cached = batch.cached
            self._facts.difference, self._facts.from_disk = batch.difference, batch.from_disk
        self._receivers.receive(batch.results)
        for event in batch.events:
            if event.token >= 0:
                self._tokens.append(event.token)
            self._ended = self._ended or event.finish_reason is not None
        self.events.give([TimedEvent(now, event) for event in batch.events])

    def _refused(self, refusal: Refusal) -> bool:
        """Handle a refusal. A request that began on another replica waits for room in a queue, and
        one whose engine stopped goes on elsewhere; any other one fails."""
        error = refusal.error
        if isinstance(error, EngineStopped):
            self._stopped = error
            self._driver.left(refusal.replica, error)
            return False
        if self.taken.done() and isinstance(error, QueueFull):
            time.sleep(error.retry_after)
            return False
        self._fail(error)
        return True

    def _fail(self, error: ZincError) -> None:
        if not self.taken.done():
            self.taken.set_exception(error)
        self.events.fail(error)


class ReplicatedStream:
    """The events of any number of requests. One thread takes from it."""

    def __init__(self) -> None:
        self.facts: dict[int, RequestFacts] = {}
        self._pumps: dict[int, _Pump] = {}
        self._events = EventQueue()

    def add(self, pump: _Pump, facts: RequestFacts) -> None:
        """Add the events of one more request."""
        self.facts[pump.request.id] = facts
        self._pumps[pump.request.id] = pump
        pump.events = self._events

    def take(self, timeout: float, offer: Offer | None = None) -> list[TimedEvent]:
        """As ``EventStream.take``. Offers are called on the threads that follow replicas."""
        return self._events.take(timeout, offer)

    def wake(self) -> None:
        """As ``EventStream.wake``."""
        self._events.wake()

    def cancel(self, request_id: int | None = None, used: int | None = None) -> None:
        """As ``EventStream.cancel``."""
        for pump in list(self._pumps.values()) if request_id is None else [self._pumps[request_id]]:
            pump.cancel(used)

    def end(self, request_id: int, used: int) -> None:
        """As ``EventStream.end``, but the replica may abandon the steps in flight: it is told only
        that the request is cancelled."""
        self.cancel(request_id, used)


class ReplicatedDriver(Submits[ReplicatedStream]):
    """One driver for the replicas behind a deployment handle. Thread-safe."""

    failure: str | None = None
    memory_state: MemoryState | None = None
    """Each replica watches its own memory."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle.options(stream=True)
        self._asking = handle
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pumps: set[_Pump] = set()
        self._stands: dict[str, EngineStatistics] = {}
        self._closing = False
        self.call(lambda engine: engine.statistics)

    @property
    def statistics(self) -> EngineStatistics:
        """The sum of the replicas' counts, as each last reported them."""
        with self._lock:
            live = PrefixRouter.running
            stands = [one for name, one in self._stands.items() if name in live]
            total: EngineStatistics = summed(stands or list(self._stands.values()))
            return total

    @property
    def silence(self) -> str | None:
        """What to say while all replicas have stopped; Ray Serve replaces them. A request asks them
        again after a while, since who is told so sends none."""
        running = PrefixRouter.running
        stopped = bool(running) and running <= stopped_lately()
        return "the engines of all replicas hang; send the request again" if stopped else None

    def left(self, replica: str, error: EngineStopped) -> None:
        """Send a replica no requests for a while, since its engine stopped."""
        if replica not in stopped_lately():
            log.error("replica %s answers no more: %s", replica, error)
        running = PrefixRouter.running
        if replica in running or not running:  # It may be gone before its last words are heard.
            PrefixRouter.stopped[replica] = time.monotonic()

    def listen(self, listener: Listener) -> None:
        """Does nothing: replicas do not report steps, since they are too many to send."""

    def open_stream(self) -> ReplicatedStream:
        """As ``EngineDriver.open_stream``, without arguments."""
        return ReplicatedStream()

    def new_id(self) -> int:
        """An id for a request."""
        return next(self._ids)

    def submit_to(
        self, stream: ReplicatedStream, submissions: Sequence[Submission]
    ) -> list[ZincError | None]:
        """As ``EngineDriver.submit_to``, but experts are not read: a request that moves would read
        them twice."""
        if self._closing:
            raise EngineStopped("the server is shutting down")
        begun = [self._begin(stream, submission) for submission in submissions]
        return [one if isinstance(one, ZincError) else self._refused(one) for one in begun]

    def _begin(
        self, stream: ReplicatedStream, submission: Submission
    ) -> Sequence[_Pump] | ZincError:
        """Start a thread for each request of a submission."""
        now = time.monotonic()
        if submission.experts:
            return RequestError("experts", "stay where they are computed: on a replica")
        asked = [Receivers.of(request, submission) for request in submission.requests]
        facts = [RequestFacts(now) for _ in asked]
        pumps = [_Pump(self, *both) for both in zip(asked, facts, strict=True)]
        for pump, noted in zip(pumps, facts, strict=True):
            stream.add(pump, noted)
            with self._lock:
                self._pumps.add(pump)
            threading.Thread(target=pump.run, name="replica", daemon=True).start()
        return pumps

    def _refused(self, pumps: Sequence[_Pump]) -> ZincError | None:
        """The error if all requests of a submission were refused."""
        try:
            for pump in pumps:
                pump.taken.result()
        except ZincError as error:
            for pump in pumps:
                pump.cancel()
            return error
        return None

    def call(
        self, work: Callable[Concatenate[Engine, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        """The sum of the results of ``work`` on all engines. Raises what it raises."""
        answers: list[tuple[str, Any]] = []

        def ask(engine: Engine) -> tuple[T, EngineStatistics]:
            return work(engine, *more, **named), engine.statistics

        names: Sequence[str] = sorted(PrefixRouter.running) or [""]
        for name in names:
            question = Question(name, ask)
            try:
                answers.append((name, self._ask(question)))
            except (RayActorError, TimeoutError):
                log.warning("replica %s does not answer", name or "(any)")
            except EngineStopped as error:
                self.left(name, error)
            else:
                PrefixRouter.stopped.pop(name, None)
        if not answers:
            raise EngineStopped(self.silence or "no replica answers")
        for name, (_, statistics) in answers:
            self._note(name, statistics)
        total: T = summed([answer for _, (answer, _) in answers])
        return total

    def close(self, drain_seconds: float = 0.0) -> None:
        """Let running requests end for up to ``drain_seconds``, then end the rest."""
        deadline = time.monotonic() + drain_seconds
        self._closing = drain_seconds > 0 or self._closing
        while self._pumps and time.monotonic() < deadline:
            time.sleep(0.05)
        self._closing = True
        with self._lock:
            pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
            pump.events.fail(EngineStopped("the server is shutting down"))

    def heard(self, batch: RequestUpdate) -> None:
        """Take a replica's counts from its update."""
        PrefixRouter.stopped.pop(batch.replica, None)
        self._note(batch.replica, batch.statistics)

    def _note(self, replica: str, statistics: EngineStatistics) -> None:
        """Keep a replica's counts, and drop those of replicas that are gone."""
        with self._lock:
            self._stands[replica] = statistics
            live = PrefixRouter.running
            if live and len(self._stands) > len(live):
                stands = self._stands.items()
                self._stands = {name: one for name, one in stands if name in {*live, replica}}

    def end_answer(self, end: AnswerEnd) -> None:
        """Tell a replica the length of an answer, without waiting."""
        self._asking.end_answer.remote(end)

    def forget(self, pump: _Pump) -> None:
        """Forget a request that ended."""
        with self._lock:
            self._pumps.discard(pump)

    def _ask(self, question: Question) -> Any:
        try:
            return self._asking.ask.remote(question).result(timeout_s=ANSWER_SECONDS)
        except RayActorError:
            raise
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, ZincError) else error) from None
