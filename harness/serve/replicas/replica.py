"""A replica: an engine in its own process, which the server sends requests to."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from contract.errors import ZincError
from contract.types import TokenEvent
from harness.host.disk import forgetting
from harness.host.engine_thread import EngineThread
from harness.host.remote.work import Job, Work, submission_of
from harness.host.stream_driver import EventStream
from harness.host.submissions import EndMessages, EngineStopped
from harness.serve.accounts import Accounts
from harness.serve.model import ModelOptions, open_model
from harness.serve.replicas.work import AnswerEnd, Question, Refusal, RequestUpdate

T = TypeVar("T")
WAIT_SECONDS = 0.5
WORDS = EndMessages(remedy="send the request again")
MAX_STREAMS = 4096
"""Most streams that are kept until the server reports how many of their tokens the answers use."""


class Replica:
    """The class that Ray Serve instantiates in each process. ``tenants`` is the tenants file."""

    def __init__(self, path: Path, options: ModelOptions, tenants: Path | None) -> None:
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._owned = ExitStack()
        accounts = Accounts(tenants)
        forget = forgetting(options.session.disk_cache)
        thread = self._owned.enter_context(EngineThread(accounts.tenants, WORDS, forget))
        self._model = open_model(path, options, thread, self._owned)
        self._driver = self._model.driver
        at_once = options.session.slots + options.session.queue_depth
        self._threads = ThreadPoolExecutor(at_once + 2, "replica")
        self._streams: OrderedDict[int, EventStream] = OrderedDict()

    async def generate(self, work: Work) -> AsyncIterator[RequestUpdate | Refusal]:
        """The events of a request, until it ends or the server no longer listens."""
        stream = self._driver.open_stream()
        self._streams[work.request.id] = stream
        self._streams.move_to_end(work.request.id)
        while len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        sent = 0
        try:
            job = await self._blocking(Job, work, self._model.grammars)
            submission = submission_of([job])
            (error,) = await self._blocking(self._driver.submit_to, stream, [submission])
            if error is not None:
                yield Refusal(error, self._name)
                return
            yield self._batch(stream, job, (), ended=False)
            ended = False
            while not ended:
                delivered = await self._blocking(stream.take, WAIT_SECONDS)
                events = tuple(one.event for one in delivered)
                ended = any(event.finish_reason is not None for event in events)
                if ended:
                    # The statistics of the last update must not count this request.
                    await self._blocking(self._driver.call, lambda engine: engine.statistics)
                sent += sum(event.token >= 0 for event in events)
                yield self._batch(stream, job, events, ended)
        except ZincError as error:
            yield Refusal(error, self._name)
        finally:
            stream.cancel(work.request.id, sent)

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica whose engine has ended or hangs."""
        problem = self._driver.failure or self._driver.silence
        if problem is not None:
            raise EngineStopped(problem)

    async def end_answer(self, end: AnswerEnd) -> None:
        """Count the tokens of an answer only, also when its request has ended already."""
        stream = self._streams.get(end.request_id)
        if stream is not None:
            stream.cancel(end.request_id, end.used)

    async def ask(self, question: Question) -> Any:
        """The answer of the engine to a question."""
        return await self._blocking(self._driver.call, question.ask)

    def _batch(
        self, stream: EventStream, job: Job, events: tuple[TokenEvent, ...], ended: bool
    ) -> RequestUpdate:
        facts = stream.facts[job.work.request.id]
        return RequestUpdate(
            replica=self._name,
            events=events,
            cached=facts.cached,
            from_disk=facts.from_disk,
            difference=facts.difference,
            preempted=facts.preempted,
            admitted=facts.admitted is not None,
            statistics=self._driver.statistics,
            results=job.results(ended),
        )

    async def _blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *arguments))

    def __del__(self) -> None:
        self._owned.close()
