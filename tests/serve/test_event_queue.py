"""Events from one thread to another: in order, each once, accepted while one waits, or taken."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from contract.types import TokenEvent
from harness.host.event_queue import EventQueue, TimedEvent
from harness.host.stream_driver import EventStream
from harness.host.submissions import EngineStopped
from harness.serve import streams
from tests.patience import PATIENCE_SECONDS
from tests.serve.test_sent_at_once import (
    ASKED,
    CHAT,
    CHATTED,
    COMPLETIONS,
    RESPONDED,
    STREAMED,
    answer_of,
)

LONG = PATIENCE_SECONDS


def events(*tokens: int) -> list[TimedEvent]:
    return [TimedEvent(0.0, TokenEvent(1, token, 0, None)) for token in tokens]


def tokens_of(delivered: Sequence[TimedEvent]) -> list[int]:
    return [one.event.token for one in delivered]


def waiting(event_queue: EventQueue) -> None:
    """Until an offer is there."""
    deadline = time.monotonic() + LONG
    while event_queue._offer is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Taker:
    """Takes in a thread of its own, once, and keeps what it got."""

    def __init__(self, event_queue: EventQueue, timeout: float, offer: Callable[..., bool]) -> None:
        self.taken: list[int] | None = None
        self.error: Exception | None = None
        self._arguments = event_queue, timeout, offer
        self._thread = threading.Thread(target=self._take)
        self._thread.start()
        waiting(event_queue)

    def _take(self) -> None:
        event_queue, timeout, offer = self._arguments
        try:
            self.taken = tokens_of(event_queue.take(timeout, offer))
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(LONG)
        assert not self._thread.is_alive()


def test_what_is_accepted_wakes_nobody():
    accepted: list[int] = []
    event_queue = EventQueue()
    taker = Taker(event_queue, LONG, lambda given: not accepted.extend(tokens_of(given)))
    event_queue.give(events(1, 2))
    event_queue.give(events(3))
    assert (accepted, taker.taken, len(event_queue)) == ([1, 2, 3], None, 0)
    event_queue.fail(EngineStopped("over"))
    taker.join()
    assert isinstance(taker.error, EngineStopped)


def test_what_is_refused_is_taken_and_nothing_more_is_offered():
    offered: list[list[int]] = []

    def refuse(given: Sequence[TimedEvent]) -> bool:
        offered.append(tokens_of(given))
        return False

    event_queue = EventQueue()
    taker = Taker(event_queue, LONG, refuse)
    event_queue.give(events(1, 2))
    event_queue.give(events(3))
    taker.join()
    rest = tokens_of(event_queue.take(0))
    assert taker.taken is not None
    assert taker.taken + rest == [1, 2, 3]
    assert offered == [[1, 2]]


class Meanwhile:
    """A queue: whenever somebody waits for it, what ``happens`` says happens first."""

    def __init__(self, event_queue: EventQueue, *happens: Callable[[], None]) -> None:
        self._queue = event_queue._queue
        self._happens = list(happens)
        self.waited: list[float] = []
        event_queue._queue = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, timeout: float) -> object:
        self.waited.append(timeout)
        if self._happens:
            self._happens.pop(0)()
        return self._queue.get(block=False)


def test_nothing_is_offered_before_what_waits_is_taken():
    event_queue = EventQueue()
    event_queue.give(events(1))
    Meanwhile(event_queue, lambda: event_queue.give(events(2)))
    offered: list[TimedEvent] = []
    assert tokens_of(event_queue.take(LONG, lambda given: not offered.extend(given))) == [1, 2]
    assert offered == []


def test_nothing_is_offered_when_nobody_waits_any_more():
    event_queue = EventQueue()
    offered: list[TimedEvent] = []
    assert event_queue.take(0, lambda given: not offered.extend(given)) == []
    event_queue.give(events(1))
    assert (offered, len(event_queue)) == ([], 1)


def test_what_an_offer_raises_reaches_who_takes():
    def fail(given: Sequence[TimedEvent]) -> bool:
        raise ValueError("of the offer")

    event_queue = EventQueue()
    taker = Taker(event_queue, LONG, fail)
    event_queue.give(events(1))
    taker.join()
    assert str(taker.error) == "of the offer"
    assert len(event_queue) == 0


def test_an_offer_may_end_the_waiting():
    """And is not asked again, though who takes has not come to it yet."""
    event_queue = EventQueue()
    asked: list[int] = []

    def last(given: Sequence[TimedEvent]) -> bool:
        asked.extend(tokens_of(given))
        event_queue.wake()
        return True

    taker = Taker(event_queue, LONG, last)
    event_queue.give(events(1))
    event_queue.give(events(2))
    taker.join()
    assert asked == [1]
    assert taker.taken is not None
    assert taker.taken + tokens_of(event_queue.take(0)) == [2]


def test_the_waiting_counts_from_what_was_accepted_last():
    """Who waits is told of silence only, not of the end of its own patience."""
    event_queue = EventQueue()
    queue = Meanwhile(event_queue, lambda: event_queue.give(events(1)), lambda: None)
    assert event_queue.take(LONG, lambda given: True) == []
    assert len(queue.waited) == 2


@pytest.mark.parametrize("refuses", [2, 3, 7])
def test_every_event_comes_once_and_in_order(refuses):
    """By either way, whoever is slow; and never are both at work."""
    event_queue = EventQueue()
    told: list[int] = []
    at_work = threading.Lock()
    ways = set()

    def tell(given: Sequence[TimedEvent], way: str) -> None:
        assert at_work.acquire(blocking=False)
        ways.add(way)
        told.extend(tokens_of(given))
        at_work.release()

    def offer(given: Sequence[TimedEvent]) -> bool:
        if given[0].event.token % refuses == 0:
            return False
        tell(given, "offered")
        return True

    def take() -> None:
        while len(told) < 3000:
            tell(event_queue.take(0.001, offer), "taken")

    taker = threading.Thread(target=take)
    taker.start()
    for number in range(3000):
        event_queue.give(events(number))
        if number % 11 == 1:
            while event_queue._offer is None:
                assert taker.is_alive()
                time.sleep(0.0002)
    taker.join(LONG)
    assert told == list(range(3000))
    assert ways == {"offered", "taken"}


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (COMPLETIONS, ASKED, 1),
        (COMPLETIONS, {**ASKED, "n": 2}, 1),
        (CHAT, {**CHATTED, "stream": False}, 1),
        ("/v1/responses", {**RESPONDED, "ignore_eos": True}, 1),
        (COMPLETIONS, STREAMED, 2),
    ],
)
def test_a_thread_of_http_is_woken_for_the_answer_and_not_for_its_tokens(
    server, monkeypatch, path, body, most
):
    """It is woken for the head of a stream, and for the end of an answer. A thread that is woken in
    every step takes the interpreter from the engine's thread."""
    # One that looks whether its client is there takes what comes just then.
    monkeypatch.setattr(streams, "POLL_SECONDS", 10 * PATIENCE_SECONDS)
    woken, take = Counter[str](), EventStream.take

    def counted(stream: EventStream, timeout: float, offer: Any = None) -> Any:
        taken = take(stream, timeout, offer)
        woken["for tokens" if taken else "without"] += 1
        return taken

    monkeypatch.setattr(EventStream, "take", counted)
    answer_of(server, path, body)
    assert woken["for tokens"] <= most - 1
    assert woken["without"] >= 1
