"""A streamed answer, for a thread or for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import NoReturn

from contract.errors import RequestError
from harness.host.stream_driver import EventStream, StreamDriver
from harness.host.submissions import WAIT_SECONDS
from zinc_rt.outputs import Output, Piece
from zinc_rt.pending import Pending
from zinc_rt.shapes import naming


class Stream:
    """The pieces of one answer: ``for piece in stream``, or ``async for`` in a coroutine. The
    request begins with the iteration and is cancelled if that ends early. While nobody iterates,
    the request is stalled. ``names`` as of ``RequestError.renamed``."""

    def __init__(
        self, driver: StreamDriver, prepare: Callable[[], Pending], names: Mapping[str, str]
    ) -> None:
        self._driver = driver
        self._prepare = prepare
        self._names = names
        self._output: Output | None = None

    def __repr__(self) -> str:
        return "Stream(not finished)" if self._output is None else f"Stream({self._output!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be copied or sent to another process; its output can be")

    @property
    def output(self) -> Output:
        """The whole answer, after the end of the iteration. Raises RequestError before."""
        if self._output is None:
            raise RequestError("output", "is there when the answer has been iterated to its end")
        return self._output

    def __iter__(self) -> Iterator[Piece]:
        stream = self._driver.open_stream()
        try:
            pending = self._begin(stream)
            while not pending.done:
                yield from _pieces(pending, stream, WAIT_SECONDS)
            self._output = pending.output(stream)
        finally:
            stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def ready() -> None:
            # The loop may have been closed meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.set)

        stream = self._driver.open_stream(ready=ready)
        try:
            pending = await self._begin_in_thread(stream)
            while not pending.done:
                await arrived.wait()
                arrived.clear()
                for piece in _pieces(pending, stream, 0.0):
                    yield piece
            self._output = pending.output(stream)
        finally:
            stream.cancel()

    async def _begin_in_thread(self, stream: EventStream) -> Pending:
        """``_begin`` in a thread, since the engine answers only between two steps. If the caller is
        cancelled meanwhile, the request is too."""
        left = threading.Event()

        def begin() -> Pending:
            pending = self._begin(stream)
            if left.is_set():
                stream.cancel()
            return pending

        try:
            return await asyncio.to_thread(begin)
        except asyncio.CancelledError:
            left.set()
            raise

    def _begin(self, stream: EventStream) -> Pending:
        with naming(self._names):
            pending = self._prepare()
            (error,) = self._driver.submit_to(stream, [pending.submission])
            if error is not None:
                raise error
        return pending


def _pieces(pending: Pending, stream: EventStream, wait: float) -> Iterator[Piece]:
    for delivered in stream.take(wait):
        piece = pending.take(delivered.event, stream)
        if piece is not None:
            yield piece
