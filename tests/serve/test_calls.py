"""How many calls of functions a request and a token take, in Python and of its library: what keeps
the interpreter from the engine. Time is not measured."""

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any

import pytest

from harness.host.driver import EngineDriver
from harness.host.event_queue import EventQueue
from harness.serve import listen
from harness.serve.run import Running
from tests.patience import wait_until
from tests.serve.http import Http
from tests.serve.test_sent_at_once import CHAT, COMPLETIONS, MESSAGES, step_when_all_wait

WARM = 30
"""Requests until everything is compiled and cached that is made once."""
COUNTED, LONG = 5, 4
"""Requests of one token, and of ``TOKENS``."""
TOKENS = 8
COMPLETED = {"prompt": [*range(97, 113)], "ignore_eos": True, "seed": 5}
CHATTED = {"messages": MESSAGES, "ignore_eos": True, "seed": 5}
MESSAGE = {"model": "tiny", "messages": MESSAGES}
READ, ANSWERED, BEGUN, GIVEN = "received", "service", "_begin", "give"
PARTS: tuple[tuple[type, str], ...] = (
    (listen._Channel, READ),
    (listen._Channel, ANSWERED),
    (EngineDriver, BEGUN),
    (EventQueue, GIVEN),
)
"""Reading a request, answering it, taking it into the engine, and giving events to its reader."""
Counts = dict[str, list[int]]


def counting(original: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """A function that appends how many calls it makes, on its own thread alone."""

    def counted(*arguments: Any, **named: Any) -> Any:
        calls = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            return original(*arguments, **named)
        finally:
            sys.setprofile(None)
            counts.append(calls)

    return counted


@contextmanager
def no_collections() -> Iterator[None]:
    """A context without collections: Hypothesis has functions that each of them calls."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def null_server(serve) -> Iterator[Running]:
    with serve(tier="null") as server:
        yield server


@pytest.fixture
def calls(null_server, monkeypatch) -> Callable[[str, dict[str, Any]], Counts]:
    """The calls that each part makes for requests that end with their first token but for ``give``,
    of which only those of later tokens count."""
    http, give = Http(null_server.url), EventQueue.give

    def of(path: str, body: dict[str, Any]) -> Counts:
        for _ in range(WARM):
            http.post(path, {**body, "max_tokens": 2})
        counts: Counts = defaultdict(list)
        with monkeypatch.context() as patch, no_collections():
            for owner, name in PARTS:
                patch.setattr(owner, name, counting(getattr(owner, name), counts[name]))
            for _ in range(COUNTED):
                assert http.post(path, {**body, "max_tokens": 1}).status == 200
            step_when_all_wait(null_server, patch)
            # A wait that ends early is one more, of five calls: the fewest of some answers count.
            for _ in range(LONG):
                of_tokens: list[int] = []
                counts[GIVEN] = of_tokens
                patch.setattr(EventQueue, GIVEN, counting(give, of_tokens))
                assert http.post(path, {**body, "max_tokens": TOKENS}).status == 200
                # The engine's thread may count the last event after the client has the answer.
                wait_until(lambda found=of_tokens: len(found) >= TOKENS)
                assert len(of_tokens) == TOKENS
        return counts

    return of


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (COMPLETIONS, {**COMPLETED, "stream": True}, (70, 520, 145, 48)),
        (COMPLETIONS, COMPLETED, (70, 515, 145, 32)),
        (CHAT, {**CHATTED, "stream": True}, (70, 870, 145, 56)),
        (CHAT, CHATTED, (70, 850, 145, 36)),
        ("/v1/messages", {**MESSAGE, "stream": True}, (70, 980, 145, 58)),
        ("/v1/messages", MESSAGE, (70, 885, 145, 36)),
    ],
)
def test_a_request_and_a_token_take_few_calls(calls, path, body, most):
    """The bounds are a little above what was counted: of reading, answering, beginning, giving."""
    counts = calls(path, body)
    taken = (
        sum(counts[READ]) / (COUNTED + LONG),
        min(counts[ANSWERED]),
        min(counts[BEGUN]),
        median(counts[GIVEN]),
    )
    assert all(one <= bound for one, bound in zip(taken, most, strict=True)), taken
