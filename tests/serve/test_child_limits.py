"""An engine's child process whose channel is full, and one on a system that refuses threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.types import LOCAL_TENANT
from harness.host.remote import channel, process
from harness.host.remote.channel import Channel, ChannelEnded, ChannelFull
from harness.host.remote.messages import ChildAnswer, Start
from harness.host.remote.process import WORDS, ChildProcess, EngineProcess
from harness.host.remote.server import EngineServer
from harness.host.submissions import EngineStopped
from harness.serve.accounts import Accounts, CallEngine
from harness.serve.run import Running
from tests.patience import PATIENCE_SECONDS, wait_for_end, wait_until
from tests.serve.conftest import Serve
from tests.serve.http import Http
from tests.serve.test_counted_tokens import tenants_file
from tests.serve.test_engine_process import BODY, COMPLETIONS
from tests.serve.test_hung_engine import child_of, hung
from tests.serve.test_hung_engine import impatient as impatient
from tests.stopped import stopped

LOADED = attrgetter("loaded")
"""The names of the models of a child."""


def fill(server: Running) -> None:
    """A message to a child that reads nothing waits for room; who sends it goes on."""
    many = [b"0" * (8 << 20)]
    child_of(server).send(EngineServer.stall, "nobody", many)
    assert child_of(server)._channel._unsent


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Threads of these names cannot start."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_the_server_ends_though_the_channel_is_full(serve: Serve, impatient: None) -> None:
    with serve(engine_process=True) as server:
        child = psutil.Process(child_of(server).pid)
        with hung(child_of(server)):
            fill(server)
            wait_for_end(lambda: server.drain(10 * PATIENCE_SECONDS))
            wait_for_end(child_of(server).close)
            assert not child.is_running()
            with pytest.raises(EngineStopped):
                child_of(server).send(EngineServer.stall, "nobody", [])


def test_a_full_channel_is_told_of(
    serve: Serve, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(engine_process=True) as server:
        http = Http(server.url)
        with hung(child_of(server)):
            fill(server)
            wait_until(lambda: http.get("/health").status == 503)
            wait_until(lambda: "does not answer" in caplog.text)
            assert http.post(COMPLETIONS, BODY).status == 503
        assert http.get("/health").status == 200
        assert http.post(COMPLETIONS, BODY).status == 200


def test_a_model_that_leaves_while_the_child_hangs_is_unloaded_when_it_answers(
    serve: Serve, impatient: None, tiny_model_path: Path
) -> None:
    with serve(beside={"other": tiny_model_path}, engine_process=True) as server:
        assert Http(server.url).post(COMPLETIONS, {**BODY, "model": "other"}).status == 200
        child = child_of(server)
        (other,) = (one for one in server.models._in_memory if one is not server.models._active)
        wait_until(lambda: models_in(child) == 2)
        with hung(child):
            fill(server)
            wait_until(lambda: child.silence is not None)
            server.models._unload_later(other)
            wait_until(lambda: other not in server.models._in_memory)
        wait_until(lambda: models_in(child) == 1)


def models_in(child: ChildProcess) -> int | None:
    """The number of models of a child; None while it does not answer."""
    try:
        return len(child.ask(EngineServer.call, None, LOADED, (), {}))
    except EngineStopped:
        return None


def test_tenants_that_may_have_changed_are_sent_again(tmp_path: Path) -> None:
    """Also if the file is meanwhile what it was before."""
    sent: list[object] = []

    def silent(change: Any) -> None:
        raise EngineStopped("it does not answer")

    known: CallEngine = sent.append
    accounts = Accounts(tenants_file(tmp_path, alice=2))
    tenants_file(tmp_path, alice=3)
    with pytest.raises(EngineStopped):
        accounts.reload(silent)
    tenants_file(tmp_path, alice=2)
    accounts.reload(known)
    accounts.reload(known)
    assert len(sent) == 1


def test_a_child_that_hangs_while_it_loads_is_told_of(
    serve: Serve, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(engine_process=True) as server:
        child = child_of(server)
        with child._loading(), hung(child):
            wait_until(lambda: child._unheard > 1.5 * process.SILENT_SECONDS)
            assert child.silence is None
            monkeypatch.setattr(process, "LOADING_SECONDS", process.SILENT_SECONDS)
            assert child.silence is not None


def test_after_a_load_a_child_is_not_silent_for_what_was_asked_before_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = ChildProcess.__new__(ChildProcess)
        child._channel, child._answers, child._unheard = Channel(ours), {}, 99.0
        child._ping = -1
        child._end = lambda: None  # type: ignore[method-assign]
        other = Channel(theirs)
        other.send(ChildAnswer(1))
        other.close()
        other._reader.close()
        child._receive()
        assert child._unheard == 0.0


def test_what_there_is_no_room_for_is_sent_in_order_once_it_is_read() -> None:
    """By whatever number of threads; then the next is sent at once again."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channels = Channel(ours), Channel(theirs, waits=True)
        for number in range(3):
            channels[0].send((number, b"0" * (4 << 20)))
        assert [channels[1].receive()[0] for _ in range(3)] == [0, 1, 2]
        wait_until(lambda: not channels[0]._unsent)
        with ThreadPoolExecutor(4) as senders:
            sent = senders.map(channels[1].send, [bytes([one]) * (4 << 20) for one in range(4)])
            received = {channels[0].receive() for _ in range(4)}
            assert list(sent) == [None] * 4
        assert len(received) == 4
        for one in channels:
            one.close()
            one._reader.close()
        with pytest.raises(ChannelEnded):
            channels[0].send(1)


def test_what_waits_for_room_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides what has to be sent; once there is room all is sent again."""
    monkeypatch.setattr(channel, "MOST_UNSENT", 1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channels = Channel(ours), Channel(theirs)
        channels[0].send(b"0" * (16 << 20), needed=False)
        with pytest.raises(ChannelFull):
            channels[0].send(b"refused", needed=False)
        channels[0].send(b"needed")
        assert len(channels[1].receive()) == 16 << 20
        assert channels[1].receive() == b"needed"
        wait_until(lambda: not channels[0]._unsent)
        channels[0].send(b"again", needed=False)
        assert channels[1].receive() == b"again"
        for one in channels:
            one.close()
            one._reader.close()


def test_a_child_that_reads_nothing_is_sent_no_more_requests(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is known to hang."""
    monkeypatch.setattr(channel, "MOST_UNSENT", 1 << 20)
    with serve(engine_process=True) as server:
        http = Http(server.url)
        with stopped(child_of(server).pid):
            fill(server)
            reply = http.post(COMPLETIONS, BODY)
            assert (reply.status, reply.error["code"]) == (503, "engine_stopped")
        wait_until(lambda: not child_of(server)._channel._unsent)
        assert http.post(COMPLETIONS, BODY).status == 200


def test_who_waits_for_room_is_told_of_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as senders:
        channel = Channel(ours, waits=True)
        waits = senders.submit(channel.send, b"0" * (8 << 20))
        wait_until(lambda: bool(channel._unsent))
        channel.close()
        with pytest.raises(ChannelEnded):
            waits.result()
        channel._reader.close()


def test_a_child_whose_watch_is_refused_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "watch", "engine")
    before = set(psutil.Process().children())
    with EngineProcess(lambda: [LOCAL_TENANT]) as engines, pytest.raises(RuntimeError):
        engines.call(LOADED)
    assert set(psutil.Process().children()) <= before


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineServer, Callable[[], Any]]]:
    """A server of engines on a system that refuses threads, and what receives its answers."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channels = Channel(theirs), Channel(ours)
        server = EngineServer(channels[0], Start((LOCAL_TENANT,), WORDS, None, 0))
        refuse(monkeypatch, "question", "grammars", "spare")
        yield server, channels[1].receive
        server._thread.close()
        for channel in channels:
            channel.close()
            channel._reader.close()


def test_where_threads_are_refused_the_child_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(monkeypatch) as (server, receive):
        server.ping(1)
        assert receive() == ChildAnswer(1)
        server.call(2, None, LOADED, (), {})
        refused = receive()
        assert refused.number == 2
        assert "can't start new thread; send the request again later" in str(refused.error)
        server.unload(3, "nobody")
        assert receive() == ChildAnswer(3)


def test_where_threads_are_refused_a_drain_can_still_be_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Driver:
        cut = threading.Event()

        def close(self, seconds: float) -> None:
            if seconds:
                assert self.cut.wait(PATIENCE_SECONDS)
            else:
                self.cut.set()

    with refusing(monkeypatch) as (server, receive):
        monkeypatch.setattr(server, "_driver", lambda key: Driver())
        server.close(1, "0", 30.0)
        server.ping(2)
        assert receive() == ChildAnswer(2)
        server.close(3, "0", 0.0)
        assert {receive(), receive()} == {ChildAnswer(1), ChildAnswer(3)}


def test_metrics_are_told_where_threads_are_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        http = Http(server.url)
        known = http.get("/metrics").body
        refuse(monkeypatch, "usage")
        reply = http.get("/metrics")
        assert reply.status == 200
        assert [line for line in reply.body.splitlines() if b":tenant_pages" in line] == [
            line for line in known.splitlines() if b":tenant_pages" in line
        ]
