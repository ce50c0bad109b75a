"""Replicas whose device hangs within a step: their requests go on elsewhere, and they say so to
who asks whether they are well. Ray Serve is a double."""

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from contract.types import Request, SamplingParams
from harness.host.options import SessionOptions
from harness.host.submissions import EngineStopped, Submission
from harness.serve.model import ModelOptions
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.engine_child import hang_while, rests
from tests.serve.ray_double import Handle, doubled_ray
from tests.serve.test_hung_step import soon

TOKENS = 12
REQUESTS = 4
SENTENCE = "the engine hangs; send the request again"
__all__ = ["soon"]


@pytest.fixture
def deployed(tiny_model_path: Path, tmp_path: Path, soon: None) -> Iterator[tuple[Any, list[Any]]]:
    """A driver of two replicas, and the replicas."""
    with doubled_ray(), ExitStack() as owned:
        from harness.serve.replicas.driver import ReplicatedDriver
        from harness.serve.replicas.replica import Replica

        router: Any = sys.modules["harness.serve.replicas.router"]
        # What is told of a hang is not too old when a busy machine comes to it.
        router.STOPPED_SECONDS = 10 * PATIENCE_SECONDS
        session = SessionOptions(tier="cpu", context=256, slots=REQUESTS)
        options = ModelOptions(session, "m", tmp_path / "digests.json")
        replicas = [Replica(tiny_model_path, options, None) for _ in range(2)]
        handle = owned.enter_context(closing(Handle(replicas)))
        driver = ReplicatedDriver(handle)  # type: ignore[arg-type]
        owned.callback(driver.close)
        yield driver, replicas


def answers(driver: Any, count: int = REQUESTS) -> list[list[int]]:
    """The tokens of some answers that are computed together. Raises EngineStopped."""
    stream, numbers = driver.open_stream(), [driver.new_id() for _ in range(count)]
    sampling = SamplingParams(temperature=0.9, seed=4, repeat_last_n=0)
    for at, number in enumerate(numbers):
        request = Request(number, (3 + at, 4, 5), TOKENS, sampling, ignore_end=True)
        (refused,) = driver.submit_to(stream, [Submission([request])])
        if refused is not None:
            raise refused
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    left = set(numbers)
    while left:
        for _, event in stream.take(PATIENCE_SECONDS):
            tokens[event.request_id] += [event.token] * (event.token >= 0)
            left -= {event.request_id} if event.finish_reason is not None else set()
    return list(tokens.values())


def test_requests_of_a_replica_that_hangs_go_on_elsewhere(deployed, tmp_path, caplog):
    """With the same tokens, and its place is known as long as it hangs."""
    from harness.serve.replicas.router import PrefixRouter

    driver, (one, other) = deployed
    known, hangs = answers(driver), tmp_path / "hangs"
    one._driver.call(hang_while, hangs)
    hangs.touch()
    assert answers(driver) == known
    assert set(PrefixRouter.stopped) == {one._name}
    assert driver.silence is None
    assert f"{one._name} answers no more: {SENTENCE}" in caplog.text
    with pytest.raises(EngineStopped, match=re.escape(SENTENCE)):
        asyncio.run(one.check_health())
    asyncio.run(other.check_health())
    # What all are asked, the others answer.
    assert driver.call(rests) in (True, 1)
    hangs.unlink()
    wait_until(lambda: one._driver.silence is None)
    driver.call(rests)
    assert not PrefixRouter.stopped
    asyncio.run(one.check_health())
    assert answers(driver) == known


def let_hang(driver: Any, replicas: list[Any], hangs: Path) -> None:
    """All replicas hang while the file is there, who waits is told, and the server knows it."""
    for one in replicas:
        one._driver.call(hang_while, hangs)
    hangs.touch()
    with pytest.raises(EngineStopped, match=re.escape(SENTENCE)):
        answers(driver, 1)
    wait_until(lambda: driver.silence is not None)


def test_where_all_hang_the_server_says_so(deployed, tmp_path):
    """Who waits is told, too, and so is who comes; once they go on they answer as before."""
    driver, replicas = deployed
    known, hangs = answers(driver, 1), tmp_path / "hangs"
    let_hang(driver, replicas, hangs)
    with pytest.raises(EngineStopped, match="hang"):
        driver.call(rests)
    hangs.unlink()
    wait_until(lambda: all(one._driver.silence is None for one in replicas))
    driver.call(rests)
    assert driver.silence is None
    assert answers(driver, 1) == known


def test_who_comes_is_told_no_longer_than_they_hang(deployed, tmp_path, monkeypatch):
    """A server that refuses all asks no replica: those that go on are tried again after a while."""
    from harness.serve.replicas import router

    driver, replicas = deployed
    known, hangs = answers(driver, 1), tmp_path / "hangs"
    let_hang(driver, replicas, hangs)
    hangs.unlink()
    wait_until(lambda: all(one._driver.silence is None for one in replicas))
    assert driver.silence is not None
    monkeypatch.setattr(router, "STOPPED_SECONDS", 0.0)
    assert driver.silence is None
    assert answers(driver, 1) == known


def test_replicas_that_come_instead_are_known_at_once(deployed):
    """Without a request, since the server refuses all of them until then."""
    driver, (one, other) = deployed
    driver.call(rests)
    for name in (one._name, other._name):
        driver.left(name, EngineStopped(SENTENCE))
    driver.handle.replace([other])
    assert driver.silence is not None
    other._name = "a later replica"
    driver.handle.replace([other])
    assert driver.silence is None
    assert answers(driver)


def test_of_replicas_that_are_gone_nothing_is_kept(deployed):
    """However many came and went."""
    from harness.serve.replicas.router import PrefixRouter

    driver, (one, other) = deployed
    affinity = driver.handle._router._affinity
    for number in range(3):
        other._name = f"replica {number} of them"
        driver.handle.replace([one, other])
        driver.call(rests)
        answers(driver)
        gone = other._name
        driver.left(gone, EngineStopped(SENTENCE))
        driver.handle.replace([one])
        driver.left(gone, EngineStopped(SENTENCE))
        driver.call(rests)
        kept = {*PrefixRouter.stopped, *driver._stands, *affinity._load}
        assert kept.union(*affinity._replicas_of.values()) <= {one._name}
