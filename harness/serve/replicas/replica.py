"""A replica: an engine in its own process, which the server sends requests to."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from contract.errors import ZincError
from contract.types import TokenEvent
from harness.digest import RowDigests, RunningDigest
from harness.host.collectors import PromptScores
from harness.host.disk import forgetting
from harness.host.driver import EventStream
from harness.host.engine_thread import EngineThread
from harness.host.submissions import Submission, joined_sinks
from harness.leaves import leaves_of_rows
from harness.serve.accounts import Accounts
from harness.serve.model import ModelOptions, ServedModel, open_model
from harness.serve.receipts.document import VERSION
from harness.serve.replicas.work import AnswerEnd, Question, Refusal, RequestUpdate, Work
from reference.engine.sequence import LogitsSink
from reference.runner import HIDDEN, LOGITS

T = TypeVar("T")
WAIT_SECONDS = 0.5
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
        thread = self._owned.enter_context(EngineThread(accounts.tenants, forget=forget))
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
            job = await self._blocking(_Job, work, self._model)
            (error,) = await self._blocking(self._driver.submit_to, stream, [job.submission])
            if error is not None:
                yield Refusal(error)
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
            yield Refusal(error)
        finally:
            stream.cancel(work.request.id, sent)

    async def end_answer(self, end: AnswerEnd) -> None:
        """Count the tokens of an answer only, also when its request has ended already."""
        stream = self._streams.get(end.request_id)
        if stream is not None:
            stream.cancel(end.request_id, end.used)

    async def ask(self, question: Question) -> Any:
        """The answer of the engine to a question."""
        return await self._blocking(self._driver.call, question.ask)

    def _batch(
        self, stream: EventStream, job: _Job, events: tuple[TokenEvent, ...], ended: bool
    ) -> RequestUpdate:
        facts = stream.facts[job.work.request.id]
        digested, digests = job.new_digests()
        leaves_from, leaves = job.new_leaves()
        return RequestUpdate(
            replica=self._name,
            events=events,
            cached=facts.cached,
            from_disk=facts.from_disk,
            difference=facts.difference,
            preempted=facts.preempted,
            admitted=facts.admitted is not None,
            statistics=self._driver.statistics,
            digested=digested,
            digests=digests,
            scores=job.new_scores(),
            pool=job.work.pool if ended else None,
            leaves_from=leaves_from,
            leaves=leaves,
        )

    async def _blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *arguments))

    def __del__(self) -> None:
        self._owned.close()


class _Job:
    """A request on this replica, and its collected results."""

    def __init__(self, work: Work, model: ServedModel) -> None:
        self.work = work
        self._scores = PromptScores(work.request) if work.request.score_from else None
        self._scores_sent = False
        self._digest = RunningDigest() if work.digested else None
        self._leaves: RowDigests | None = None
        self._digests_sent = self._leaves_sent = 0
        request = work.left
        number = request.id
        masks = {}
        if work.grammar is not None:
            (masks[number],) = model.grammars.masks(work.grammar, 1)
            masks[number].before = work.tokens
        scores = {} if self._scores is None else {number: self._scores}
        first = len(work.request.prompt) - 1
        if work.pool is not None:
            pools = {number: work.pool}
            self.submission = Submission([request], pools, work.pool.rows_from, HIDDEN)
        else:
            sinks, output = self._sinks(number, model)
            self.submission = Submission([request], sinks, first, output, masks, scores)

    def _sinks(self, number: int, model: ServedModel) -> tuple[Mapping[int, LogitsSink], str]:
        """The receiver of rows, and the output it receives."""
        digests: dict[int, LogitsSink] = {} if self._digest is None else {number: self._digest}
        if not self.work.leaves:
            return digests, LOGITS
        # ``digests`` need the whole rows on the host.
        on_device = model.limits.digests and self._digest is None
        self._leaves, output = leaves_of_rows(VERSION, on_device)
        return joined_sinks(digests, {number: self._leaves}), output

    def new_digests(self) -> tuple[int, tuple[str, ...]]:
        """The digests since the last call, and the row of the first one."""
        if self._digest is None:
            return 0, ()
        first, found = self._digests_sent, tuple(self._digest.digests[self._digests_sent :])
        self._digests_sent += len(found)
        return first, found

    def new_leaves(self) -> tuple[int, tuple[str, ...]]:
        """The receipt leaves since the last call, and the row of the first one."""
        if self._leaves is None:
            return 0, ()
        first, found = self._leaves_sent, tuple(self._leaves.since(self._leaves_sent))
        self._leaves_sent += len(found)
        return first, found

    def new_scores(self) -> tuple[TokenEvent, ...]:
        """The log-probabilities of the prompt; once, when they are complete."""
        if self._scores is None or self._scores_sent or not self._scores.complete:
            return ()
        self._scores_sent = True
        return tuple(self._scores.tokens)
