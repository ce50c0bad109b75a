"""Who computes next: the engine's thread before those of clients, and these one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from harness.host import right_of_way
from harness.host.right_of_way import RightOfWay
from harness.serve.generation import Generation
from harness.serve.run import Running
from harness.serve.service import Service
from reference.runner import ModelRunner
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.conftest import Serve
from tests.serve.http import Http, posted, slow_reader

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 24, "ignore_eos": True, "seed": 5}


@pytest.fixture(autouse=True)
def no_wait_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for something that never comes fails its test."""
    monkeypatch.setattr(right_of_way, "MOST_SECONDS", 10 * PATIENCE_SECONDS)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_nobody_begins_while_the_engine_works(pool: ThreadPoolExecutor) -> None:
    way, done = RightOfWay(), []
    way.take()

    def compute() -> None:
        way.enter()
        done.append("client")
        way.leave()

    began = pool.submit(compute)
    wait_until(way._turn.locked)
    done.append("engine")
    way.give()
    began.result(PATIENCE_SECONDS)
    assert done == ["engine", "client"]


def test_one_at_a_time_and_the_next_while_one_waits(pool: ThreadPoolExecutor) -> None:
    way, first_waits, second_has = RightOfWay(), threading.Event(), threading.Event()
    at_once, most = threading.Semaphore(1), []

    def alone() -> bool:
        return at_once.acquire(blocking=False)

    def first() -> None:
        way.enter()
        most.append(alone())
        at_once.release()
        with way.left():
            first_waits.set()
            assert second_has.wait(PATIENCE_SECONDS)
        most.append(alone())
        way.leave()

    def second() -> None:
        assert first_waits.wait(PATIENCE_SECONDS)
        way.enter()
        most.append(alone())
        second_has.set()
        at_once.release()
        way.leave()

    for each in [pool.submit(first), pool.submit(second)]:
        each.result(PATIENCE_SECONDS)
    assert most == [True, True, True]


def test_who_never_entered_has_nothing_to_leave() -> None:
    way = RightOfWay()
    with way.left():
        pass
    assert not way.leave()
    assert not way._turn.locked()


def test_who_keeps_its_turn_holds_up_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Nor does an engine that never waits."""
    monkeypatch.setattr(right_of_way, "MOST_SECONDS", 0.01)
    way = RightOfWay()
    way.take()
    way.enter()
    pool.submit(way.enter).result(PATIENCE_SECONDS)
    way.leave()


@pytest.fixture(scope="module")
def ahead(serve: Serve) -> Iterator[Running]:
    """A server whose engine submits steps ahead, as on a card."""
    with serve(tier="null") as server:
        yield server


def test_what_waits_has_left(ahead: Running, pool: ThreadPoolExecutor) -> None:
    """A client that reads nothing and more requests than slots keep nobody out, and whoever waits
    for a token lets others begin."""
    http = Http(ahead.url)
    long = {**ASKED, "max_tokens": 200, "n": 4, "stream": True, "logprobs": 20}
    with closing(slow_reader(http)) as silent:
        silent.sendall(posted(COMPLETIONS, long))
        asked = [{**ASKED, "stream": n % 2 == 0} for n in range(12)]
        replies = list(pool.map(lambda body: http.post(COMPLETIONS, body), asked))
    assert {reply.status for reply in replies} == {200}


@pytest.mark.parametrize("stream", [False, True])
def test_requests_begin_and_end_while_the_engine_waits(
    ahead: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Each has its turn then."""
    way = ahead.service.model.driver.way
    told: list[tuple[str, bool]] = []
    begin, end = Generation.__init__, Service._count

    def noted(name: str, then: Callable[..., None]) -> Callable[..., None]:
        def note(*arguments: Any, **options: Any) -> None:
            told.append((name, bool(way._own.__dict__.get("has_turn"))))
            then(*arguments, **options)

        return note

    monkeypatch.setattr(Generation, "__init__", noted("begin", begin))
    monkeypatch.setattr(Service, "_count", noted("end", end))
    Http(ahead.url).post(COMPLETIONS, {**ASKED, "stream": stream})
    assert told == [("begin", True), ("end", True)]


def test_the_way_is_given_for_every_step_that_is_waited_for(
    ahead: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while there is nothing to do."""
    way = ahead.service.model.driver.way
    given, collect, submit = [], ModelRunner.collect, ModelRunner.submit

    def noted(then: Callable[..., Any]) -> Callable[..., Any]:
        def note(runner: ModelRunner, *arguments: Any) -> Any:
            given.append((then is collect, way._given.is_set()))
            return then(runner, *arguments)

        return note

    monkeypatch.setattr(ModelRunner, "collect", noted(collect))
    monkeypatch.setattr(ModelRunner, "submit", noted(submit))
    Http(ahead.url).post(COMPLETIONS, ASKED)
    assert {is_given for waits, is_given in given if waits} == {True}
    assert not any(is_given for waits, is_given in given[2:] if not waits)
    wait_until(way._given.is_set)
