"""Many prompts through one engine: as many under way as keep it busy, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from contract.errors import ZincError
from harness.serve.driver import EngineDriver, EventStream
from zinc_rt.outputs import Output
from zinc_rt.pending import Pending

WAIT_SECONDS = 0.5
"""How long to wait for an event at a time: how soon Ctrl-C is seen on any system."""
UNREAD_EVENTS = 1 << 20
"""Events that may wait: the engine never rests for a batch."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A prompt that cannot begin."""

    index: int
    error: ZincError


Job = Callable[[], Pending | Refused]
"""Prepares a prompt; what it costs is paid while the engine works on others."""


def run_batch(driver: EngineDriver, jobs: Iterator[Job], at_once: int) -> Iterator[Output]:
    """The outputs of all jobs, each as soon as it is there, ``at_once`` of them under way.

    What is under way is cancelled when the iteration ends early. Raises EngineStopped.
    """
    stream = driver.open_stream(UNREAD_EVENTS)
    pending: dict[int, Pending] = {}
    in_flight = 0
    try:
        while True:
            more, refused = _begin(driver, stream, jobs, at_once - in_flight)
            yield from refused
            in_flight += len(more)
            pending.update((request.id, one) for one in more for request in one.requests)
            if not in_flight:
                return
            for output in _ended(stream, pending):
                in_flight -= 1
                yield output
    finally:
        stream.cancel()


def _begin(
    driver: EngineDriver, stream: EventStream, jobs: Iterator[Job], room: int
) -> tuple[list[Pending], list[Output]]:
    """Submit the next jobs, until ``room`` are under way: those, and what was refused."""
    begun: list[Pending] = []
    refused: list[Output] = []
    while len(begun) < room:
        batch = [prepare() for prepare in islice(jobs, room - len(begun))]
        if not batch:
            break
        ready = [one for one in batch if isinstance(one, Pending)]
        for one in batch:
            if isinstance(one, Refused):
                refused.append(Output(one.index, (), error=one.error))
        errors = driver.submit_to(stream, [one.submission for one in ready])
        for one, error in zip(ready, errors, strict=True):
            if error is None:
                begun.append(one)
            else:
                refused.append(one.failed(error))
    return begun, refused


def _ended(stream: EventStream, pending: dict[int, Pending]) -> Iterator[Output]:
    """What ends with the next events."""
    for delivered in stream.take(WAIT_SECONDS):
        one = pending.get(delivered.event.request_id)
        if one is None:
            continue
        try:
            one.take(delivered.event, stream)
            if not one.done:
                continue
            output = one.output(stream)
        except ZincError as error:
            output = one.failed(error)
        numbers = [request.id for request in one.requests]
        stream.release(numbers)
        for number in numbers:
            del pending[number]
        yield output
