"""One replica: an engine of its own in a process of its own, asked by the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from contract.errors import ZincError
from harness.serve.accounts import Accounts
from harness.serve.driver import EventStream
from harness.serve.model import ModelOptions, open_model
from harness.serve.replicas.work import Batch, Question, Refusal, Work

T = TypeVar("T")
WAIT_SECONDS = 0.5


class Replica:
    """What Ray Serve makes one of in each process. ``tenants`` is the file of accounts."""

    def __init__(self, path: Path, options: ModelOptions, tenants: Path | None) -> None:
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._owned = ExitStack()
        accounts = Accounts(tenants)
        self._driver = open_model(path, options, accounts.tenants, self._owned).driver
        at_once = options.session.slots + options.queue_depth
        self._threads = ThreadPoolExecutor(at_once + 2, "replica")

    async def generate(self, work: Work) -> AsyncIterator[Batch | Refusal]:
        """The events of a request, until it ends or the server no longer listens."""
        try:
            stream = await self._blocking(self._driver.submit, [work.request])
        except ZincError as error:
            yield Refusal.of(error)
            return
        try:
            yield self._batch(stream, work, ())
            ended = False
            while not ended:
                delivered = await self._blocking(stream.take, WAIT_SECONDS)
                events = tuple(one.event for one in delivered)
                ended = any(event.finish_reason is not None for event in events)
                if ended:
                    # So that what is told of the engine no longer counts this request.
                    await self._blocking(self._driver.call, lambda engine: engine.statistics)
                yield self._batch(stream, work, events)
        except ZincError as error:
            yield Refusal.of(error)
        finally:
            stream.cancel()

    async def ask(self, question: Question) -> Any:
        """What the engine answers."""
        return await self._blocking(self._driver.call, question.ask)

    def _batch(self, stream: EventStream, work: Work, events: tuple[Any, ...]) -> Batch:
        facts = stream.facts[work.request.id]
        return Batch(
            replica=self._name,
            events=events,
            cached=facts.cached,
            preempted=facts.preempted,
            admitted=facts.admitted is not None,
            statistics=self._driver.statistics,
        )

    async def _blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *arguments))

    def __del__(self) -> None:
        self._owned.close()
