"""A server whose engines are in a child process: what happens when either process ends, and that
clients who come and go at random get the bytes that a server without a child gives."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.host.remote.driver import ProcessDriver
from harness.host.remote.messages import Step
from harness.host.remote.process import EngineProcess
from harness.serve import listen
from harness.serve.accounts import usage_in
from harness.serve.run import Running
from reference.engine import Engine
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.conftest import Serve
from tests.serve.engine_child import keep_pace, never_too_slow, taken
from tests.serve.http import Http, closing_after, posted, slow_reader, unchunked
from tests.serve.test_process import process
from tests.serve.test_sent_at_once import stalled, text_of
from tests.stopped import stop

COMPLETIONS = "/v1/completions"
CLIENTS, ROUNDS = 8, 6
BODY = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def child(serve: Serve) -> Iterator[Running]:
    with serve(engine_process=True) as server:
        yield server


def pid_of(server: Running) -> int:
    """The process of the server's engines."""
    engines = server.models._thread
    assert isinstance(engines, EngineProcess)
    assert engines.pid is not None
    return engines.pid


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says but for what differs between two runs."""
    varying = {"id", "created", "x_zinc"}
    return {name: value for name, value in answer.items() if name not in varying}


def test_a_killed_child_ends_its_answers_and_the_next_request_opens_the_model_again(
    child: Running, caplog: pytest.LogCaptureFixture
) -> None:
    http = Http(child.url)
    before = http.post(COMPLETIONS, BODY).answer
    killed = pid_of(child)
    stop(killed)
    with ThreadPoolExecutor(2) as clients:
        asked = [{**BODY, "stream": stream} for stream in (True, False)]
        replies = clients.map(lambda body: http.post(COMPLETIONS, body), asked)
        wait_until(lambda: len(child.service.model.driver._streams) == 2)  # type: ignore[attr-defined]
        os.kill(killed, signal.SIGKILL)
        for reply in replies:
            assert (reply.status, reply.error["code"]) == (503, "engine_stopped")
            assert "the engine's process ended; send the request again" in reply.error["message"]
    assert http.get("/health").status == 503
    after = http.post(COMPLETIONS, BODY).answer
    assert told(after) == told(before)
    assert pid_of(child) != killed
    assert http.get("/health").status == http.get("/ready").status == 200
    said = [one.message for one in caplog.records if "engine's process" in one.message]
    assert said == [f"the engine's process {killed} ended: killed by SIGKILL"]


def test_a_model_whose_next_child_ends_too_cannot_be_opened_again(serve, monkeypatch):
    with serve(engine_process=True) as server:
        os.kill(pid_of(server), signal.SIGKILL)
        wait_until(lambda: server.service.model.driver.failure is not None)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        reply = Http(server.url).post(COMPLETIONS, BODY)
        assert (reply.status, reply.error["code"]) == (503, "engine_stopped"), reply.body


def test_a_model_that_cannot_be_opened_again_answers_when_it_can(
    serve: Serve, tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, away = tmp_path / "model.gguf", tmp_path / "away"
    path.write_bytes(tiny_model_path.read_bytes())
    with serve(path=path, engine_process=True) as server:
        http = Http(server.url)
        os.kill(pid_of(server), signal.SIGKILL)
        path.rename(away)
        wait_until(lambda: http.get("/health").status == 503)
        for reply in (http.post(COMPLETIONS, BODY), http.get("/ready")):
            assert (reply.status, reply.error["code"]) == (503, "engine_stopped"), reply.body
            assert str(tmp_path) not in reply.error["message"]
        said = [one.message for one in caplog.records if one.levelname == "ERROR"]
        assert all("tiny cannot be opened again: " in line for line in said[1:])
        assert str(path) in said[1]
        away.rename(path)
        assert http.post(COMPLETIONS, BODY).status == http.get("/health").status == 200


def test_a_child_that_ends_while_it_loads_a_named_model_is_no_fault_of_the_model(
    serve: Serve, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(beside={"other": tiny_model_path}, engine_process=True) as server:
        http, opened, loading = Http(server.url), server.models._open, threading.Event()
        pid, engines = pid_of(server), server.models._thread

        def stopped(*arguments: Any) -> Any:
            stop(pid)
            loading.set()
            return opened(*arguments)

        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as clients:
            patched.setattr(server.models, "_open", stopped)
            asked = clients.submit(http.post, COMPLETIONS, {**BODY, "model": "other"})
            wait_until(loading.is_set)
            wait_until(lambda: bool(engines._child._answers))  # type: ignore[union-attr]
            os.kill(pid, signal.SIGKILL)
            reply = asked.result()
        assert (reply.status, reply.error["code"]) == (503, "engine_stopped"), reply.body
        assert http.post(COMPLETIONS, {**BODY, "model": "other"}).status == 200


def test_a_server_that_ends_while_it_opens_its_model_again_ends_without_a_fault(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    with ThreadPoolExecutor(1) as clients:
        with serve(engine_process=True) as server:
            http, opened, loading = Http(server.url), server.models._open, threading.Event()
            os.kill(pid_of(server), signal.SIGKILL)
            wait_until(lambda: http.get("/health").status == 503)

            def late(*arguments: Any) -> Any:
                loading.set()
                wait_until(lambda: server.models._closing)
                return opened(*arguments)

            server.models._open = late
            asked = clients.submit(http.post, COMPLETIONS, BODY)
            wait_until(loading.is_set)
        asked.exception()
    wait_until(lambda: not any(one.is_alive() for one in server.models._retiring))
    assert not faults


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_ends_with_the_server(
    tiny_model_path: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with process(tiny_model_path, tmp_path, "--engine-process", "on") as (server, http):
        children = psutil.Process(server.pid).children(recursive=True)
        (engine,) = [one for one in children if "harness.host.remote" in one.cmdline()]
        assert http.post(COMPLETIONS, BODY).status == 200
        with http.connected() as connection:
            connection.sendall(posted(COMPLETIONS, {**BODY, "stream": True, "max_tokens": 200}))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            server.send_signal(number)
            code = server.wait(PATIENCE_SECONDS)
        assert code == {signal.SIGKILL: -9, signal.SIGTERM: 0, signal.SIGINT: 130}[number]
        engine.wait(PATIENCE_SECONDS)
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()


def test_signals_of_a_terminal_or_supervisor_do_not_end_the_child(child: Running) -> None:
    """The server decides when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid_of(child), number)
    assert Http(child.url).post(COMPLETIONS, BODY).status == 200


def body_of(number: int) -> dict[str, Any]:
    """What client ``number`` asks: plain, with log-probabilities, digests, a grammar or choices."""
    more: list[dict[str, Any]] = [
        {},
        {"logprobs": 3},
        {"logits_digest": True},
        {"n": 2, "stop": ["e"]},
        {"grammar": 'root ::= "a" [b-z]{1,30}', "ignore_eos": False},
    ]
    return {
        "prompt": "the quick brown fox"[: 3 + number % 11],
        "max_tokens": 8 + number % 24,
        "temperature": 0.9,
        "ignore_eos": True,
        "seed": number,
        **more[number % len(more)],
    }


def test_clients_that_leave_at_random_change_no_byte_of_others(
    serve: Serve, child: Running
) -> None:
    """Some leave before, some within their answers; at the end nothing runs and nothing is held."""
    with serve() as plain:
        http = Http(plain.url)
        wanted = [http.post(COMPLETIONS, body_of(n)).answer["choices"] for n in range(CLIENTS * 5)]
    http, draw = Http(child.url), random.Random(7)

    def client(number: int) -> None:
        for _ in range(ROUNDS):
            asked = draw.randrange(len(wanted))
            body = body_of(asked)
            if draw.random() < 0.5:
                with http.connected() as connection:
                    connection.sendall(posted(COMPLETIONS, {**body, "stream": draw.random() < 0.7}))
                    if draw.random() < 0.7:
                        connection.recv(draw.choice((1, 400, 65536)))
            else:
                assert http.post(COMPLETIONS, body).answer["choices"] == wanted[asked]

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(CLIENTS)))
    driver = child.service.model.driver
    wait_until(lambda: (now := driver.call(_counts)).count(0) == len(now))
    wait_until(lambda: driver.statistics.running == driver.statistics.waiting == 0)


def _counts(engine: Engine) -> tuple[int, int, int]:
    """Requests that run and wait, and pages in use."""
    now = engine.statistics
    return now.running, now.waiting, now.pages - now.free_pages - now.cached_pages


SAME: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": ["ab", "c"], "n": 2, "max_tokens": 9, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 3, "logits_digest": True}),
    (COMPLETIONS, {"prompt": "abc", "logit_bias": {"70": 9.0}, "min_tokens": 4, "max_tokens": 9}),
    (COMPLETIONS, {"prompt": "abc", "repetition_penalty": 1.3, "stop": ["e", "t"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_object"},
            "max_tokens": 30,
            "logprobs": True,
        },
    ),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
    ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 5}}),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 9}),
    ("/v1/embeddings", {"input": ["abc", "the quick brown fox"]}),
    ("/v1/score", {"input": ["abc", "the quick"], "top": 2}),
    ("/v1/rerank", {"query": "abc", "documents": ["ab", "the"]}),
    (COMPLETIONS, {"prompt": "a" * 3000}),
    (COMPLETIONS, {"prompt": "abc", "grammar": "root ::= "}),
    (COMPLETIONS, {"prompt": "abc", "n": 128, "experts": True}),
    (COMPLETIONS, {"prompt": "abc", "logit_bias": {"99999": 1.0}}),
)


def unnamed(body: bytes) -> str:
    """An answer without what is drawn for each."""
    text = re.sub(r'"(id|item_id|receipt)":"[^"]*"', "", body.decode())
    return re.sub(r'"\w*(created|_at|duration|tokens?)\w*":[0-9."TZ:+-]+', "", text)


def test_answers_and_refusals_are_those_of_a_server_without_a_child(
    serve: Serve, child: Running
) -> None:
    with serve() as plain:
        for path, body in SAME:
            asked = {**body, "seed": 5} if "seed" not in body and path == COMPLETIONS else body
            one, other = (Http(server.url).post(path, asked) for server in (plain, child))
            assert one.status == other.status, (path, body, other.body)
            if path in (COMPLETIONS, "/v1/embeddings", "/v1/score") or one.status != 200:
                assert unnamed(one.body) == unnamed(other.body), (path, body)


@pytest.fixture
def unread(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """``unread(events)``: a server that holds next to nothing for clients that do not read. Its
    child makes no step before the server has taken the last one's events: a quick child would
    have made the whole answer before a busy server can tell it to wait."""
    for name, value in (("UNSENT_BYTES", 1024), ("SOCKET_BYTES", 1024)):
        monkeypatch.setattr(listen, name, value)
    monkeypatch.setattr(listen, "UNREAD_SECONDS", int(10 * PATIENCE_SECONDS))
    received = ProcessDriver.received

    def told(driver: ProcessDriver, step: Step) -> None:
        received(driver, step)
        if step.events:
            driver._tell(taken)

    @contextmanager
    def start(events: int) -> Iterator[Running]:
        with serve(buffered_events=events, engine_process=True) as server:
            server.service.model.driver.call(keep_pace)
            monkeypatch.setattr(ProcessDriver, "received", told)
            yield server

    return start


def test_one_who_stops_reading_waits_alone_and_then_gets_every_byte(
    unread: Callable[[int], Any],
) -> None:
    long = {**BODY, "max_tokens": 200, "stream": True, "logprobs": 5}
    with unread(8) as server:
        http, driver = Http(server.url), server.service.model.driver
        driver.call(never_too_slow)
        alone = http.post(COMPLETIONS, long).body
        with slow_reader(http) as connection:
            connection.sendall(closing_after(posted(COMPLETIONS, long)))
            wait_until(lambda: stalled(server))
            assert http.post(COMPLETIONS, BODY).status == 200
            heard = b"".join(iter(lambda: connection.recv(4096), b""))
    assert text_of(unchunked(heard)) == text_of(alone)


def test_one_who_never_reads_is_cut_off(unread: Callable[[int], Any]) -> None:
    with unread(4) as server:
        http, driver = Http(server.url), server.service.model.driver
        with slow_reader(http) as connection:
            body = {**BODY, "max_tokens": 200, "stream": True, "n": 4, "logprobs": 20}
            connection.sendall(posted(COMPLETIONS, body))
            wait_until(lambda: sum(driver.call(usage_in, 0)[0].requests_finished.values()) == 4)
            since, now = driver.call(usage_in, 0)
            assert {reason.value for reason in since.requests_finished} == {"client_too_slow"}
            assert now.live == 0
            assert http.post(COMPLETIONS, BODY).status == 200


def test_children_killed_again_and_again_leave_a_server_that_answers(child: Running) -> None:
    """Every answer is whole and right, or an error that says why."""
    http, ended = Http(child.url), threading.Event()
    wanted = http.post(COMPLETIONS, BODY).answer["choices"]
    statuses: list[int] = []

    def client(_: int) -> None:
        while not ended.is_set():
            reply = http.post(COMPLETIONS, BODY)
            statuses.append(reply.status)
            if reply.status == 200:
                assert reply.json["choices"] == wanted
            else:
                assert (reply.status, reply.error["code"]) == (503, "engine_stopped"), reply.body

    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(client, number) for number in range(4)]
        try:
            killed: list[int | None] = [None]
            for _ in range(3):
                answered = statuses.count(200)
                wait_until(lambda answered=answered: statuses.count(200) > answered)
                # That answer may be one of the child before.
                wait_until(lambda: child.models._thread.pid not in killed)  # type: ignore[union-attr]
                killed.append(pid_of(child))
                os.kill(pid_of(child), signal.SIGKILL)
        finally:
            ended.set()
        for one in running:
            one.result()
    # The last kill may not be noticed yet.
    wait_until(lambda: http.post(COMPLETIONS, BODY).status == 200)
    assert http.post(COMPLETIONS, BODY).answer["choices"] == wanted
    assert json.loads(http.get("/health").body)["status"] == "ok"
