"""Tokens sent by the engine's thread: the same bytes as by the other way, whatever clients do."""

import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from contract.types import LOCAL_TENANT
from harness.host.stream_driver import EventStream
from harness.serve import listen, streams
from harness.serve.generation import LIGHT_STOP_CHARACTERS, Generation
from harness.serve.run import Running
from reference.engine import Engine
from tests.held_steps import HeldSteps, hold_steps
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.calling import CALLING, client_of
from tests.serve.http import Http, closing_after, posted, slow_reader, unchunked
from tests.serve.streams import data_of, lines_of
from tests.serve.test_connections import SILENT, heard_until, running

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 24, "ignore_eos": True, "seed": 5}
STREAMED = {**ASKED, "stream": True}
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
CHATTED = {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True, "seed": 5, "stream": True}
RESPONDED = {"input": "abc", "max_output_tokens": 24, "seed": 5, "temperature": 2, "top_k": 0}
ENGINE = "engine"
Senders = Counter[str]


@pytest.fixture(autouse=True)
def no_comments_for_silence(monkeypatch) -> None:
    """Only for tokens that say nothing yet, however slow the machine is."""
    monkeypatch.setattr(streams, "PING_SECONDS", 10 * PATIENCE_SECONDS)


@pytest.fixture
def senders(monkeypatch) -> Senders:
    """How many parts each kind of thread sent at once, by the beginning of its name."""
    told: Senders = Counter()
    send = listen._Channel.send_at_once

    def noted(channel: listen._Channel, make: Callable[..., bytes], *given: Any) -> bool:
        sent = send(channel, make, *given)
        told[threading.current_thread().name.partition("-")[0]] += sent
        return sent

    monkeypatch.setattr(listen._Channel, "send_at_once", noted)
    return told


def told(body: bytes) -> bytes:
    """The bytes of a stream but for what differs between two answers: their names and times."""
    body = re.sub(rb'"(item_)?id":"[^"]*"', b'"id":""', body)
    return re.sub(rb'"created(_at)?":\d+', b'"created":0', body)


def answer_of(server: Running, path: str, body: object, at_once: bool = True) -> bytes:
    """An answer each part of which is of one step: none begins before everybody waits for it.
    Without ``at_once`` the threads of HTTP send it alone."""
    with pytest.MonkeyPatch.context() as patch:
        if not at_once:
            patch.setattr(listen._Channel, "send_at_once", lambda channel, make, *given: False)
        step_when_all_wait(server, patch)
        return told(Http(server.url).post(path, body).body)


def step_when_all_wait(server: Running, patch: pytest.MonkeyPatch) -> None:
    """The engine begins a step once every stream that is not stalled is waited for, or when a
    request ends or begins. Streams that are there already it does not wait for: one that nobody
    reads may have room for an event still, though no thread waits for one."""
    driver = server.service.model.driver
    step, already = Engine.step, list(driver._streams.values())

    def ready(stream: EventStream) -> bool:
        return bool(driver._commands) or stream._stalled or stream._events._offer is not None

    def when_all_wait(engine: Engine) -> object:
        for stream in list(driver._streams.values()):
            wait_until(lambda stream=stream: stream in already or ready(stream))
        return step(engine)

    patch.setattr(Engine, "step", when_all_wait)


def by_the_other_way(server: Running, path: str, body: object) -> bytes:
    """The answer as it is without all this."""
    return answer_of(server, path, body, at_once=False)


def text_of(body: bytes) -> str:
    return "".join(one["choices"][0]["text"] for one in data_of(lines_of(body)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, STREAMED),
        (COMPLETIONS, {**STREAMED, "stream_options": {"include_usage": True}}),
        (CHAT, CHATTED),
        (CHAT, {**CHATTED, "stream_options": {"include_usage": True}}),
        ("/v1/responses", {**RESPONDED, "stream": True}),
        (COMPLETIONS, {**STREAMED, "logit_bias": {str(SILENT): 100.0}}),
    ],
)
def test_the_bytes_are_those_of_the_other_way(server, senders, path, body):
    """All but the first and the last part come from the engine's thread."""
    Http(server.url).post(path, body)  # both find as much of the prompt in the cache
    before = by_the_other_way(server, path, body)
    senders.clear()
    assert answer_of(server, path, body) == before
    assert senders[ENGINE] > 10
    assert set(senders) == {ENGINE}


def test_choices_of_one_request_are_sent_together(server, senders):
    """Each has its text, and each its end."""
    body = {**STREAMED, "n": 3, "temperature": 1.0}

    def texts_of(answer: bytes) -> tuple[dict[int, str], dict[int, str]]:
        texts: dict[int, str] = {}
        ends: dict[int, str] = {}
        for one in data_of(lines_of(answer)):
            (choice,) = one["choices"]
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
        return texts, ends

    before = texts_of(by_the_other_way(server, COMPLETIONS, body))
    assert texts_of(answer_of(server, COMPLETIONS, body)) == before
    assert len(set(before[0].values())) == 3
    assert senders[ENGINE] > 10


@pytest.mark.parametrize("most", [1, 2, 3])
def test_short_answers_are_whole(server, most):
    """One that ends with its first token, or in the step after."""
    body = {**STREAMED, "max_tokens": most}
    answer = answer_of(server, COMPLETIONS, body)
    assert answer == by_the_other_way(server, COMPLETIONS, body)
    assert answer.endswith(b"data: [DONE]\n\n")


def test_a_stop_string_found_between_two_steps_ends_the_answer(serve, senders):
    """In that step: no token more is computed than by the other way, and it is counted once."""
    with serve() as server:
        http = Http(server.url)
        whole = text_of(http.post(COMPLETIONS, STREAMED).body)
        body = {**STREAMED, "stop": whole[-9:-6]}
        before = by_the_other_way(server, COMPLETIONS, body)
        total = server.service.ledger.total(LOCAL_TENANT)
        senders.clear()
        answer = answer_of(server, COMPLETIONS, body)
        assert answer == before
        assert b'"finish_reason":"stop"' in answer
        assert whole.startswith(text_of(answer))
        assert answer.endswith(b"data: [DONE]\n\n")
        assert senders[ENGINE] > 5
        after = server.service.ledger.total(LOCAL_TENANT)
        assert after.requests == total.requests + 1
        assert after.completed == total.completed + 1
        wait_until(lambda: running(server) == 0)


def test_what_is_much_work_is_not_done_between_two_steps(server, http, hermes, senders):
    """Listed probabilities, long stop strings, and calls to be taken apart."""
    http.post(COMPLETIONS, {**STREAMED, "logprobs": 2})
    http.post(COMPLETIONS, {**STREAMED, "stop": ["x" * LIGHT_STOP_CHARACTERS, "y"]})
    with client_of(hermes) as client:
        list(client.chat.completions.create(**CALLING, stream=True))
    assert senders == Counter()


def test_a_part_of_what_is_sent_fits(server, senders, monkeypatch):
    """The kernel takes a few bytes, or none: what is left goes before all that follows."""
    before = by_the_other_way(server, COMPLETIONS, STREAMED)
    send, turns = listen.send_what_fits, iter(range(10**6))

    def some(connection: socket.socket, data: bytes) -> int:
        turn = next(turns)
        return send(connection, data[: (turn * 37) % 120]) if turn % 3 else 0

    monkeypatch.setattr(listen, "send_what_fits", some)
    for _ in range(4):
        assert answer_of(server, COMPLETIONS, STREAMED) == before
    assert senders[ENGINE] > 0


def test_one_who_does_not_read_holds_nobody(serve, monkeypatch, senders):
    """The other's tokens come all the while, and when the first one reads it gets every byte."""
    monkeypatch.setattr(listen, "UNSENT_BYTES", 1024)
    monkeypatch.setattr(listen, "SOCKET_BYTES", 1024)
    monkeypatch.setattr(listen, "UNREAD_SECONDS", int(10 * PATIENCE_SECONDS))
    long = {**STREAMED, "max_tokens": 200}
    with serve(buffered_events=8) as server:
        # A stalled request is ended after so many steps, and the engine steps while it waits.
        server.service.model.driver.call(lambda engine: setattr(engine, "_stall_steps", 10**6))
        http = Http(server.url)
        alone = by_the_other_way(server, COMPLETIONS, long)
        total = server.service.ledger.total(LOCAL_TENANT).completed
        with slow_reader(http) as connection:
            connection.sendall(closing_after(posted(COMPLETIONS, long)))
            wait_until(lambda: running(server) == 1)
            wait_until(lambda: stalled(server))
            senders.clear()
            short = answer_of(server, COMPLETIONS, {**long, "max_tokens": 50})
            assert text_of(alone).startswith(text_of(short).rstrip("\N{REPLACEMENT CHARACTER}"))
            assert senders[ENGINE] > 40
            wait_until(lambda: stalled(server))
            heard = b"".join(iter(lambda: connection.recv(4096), b""))
        assert text_of(unchunked(heard)) == text_of(alone)
        assert server.service.ledger.total(LOCAL_TENANT).completed == total + 2


def waiting(server: Running) -> int:
    return server.service.model.driver.call(lambda engine: engine.statistics.waiting)


def sent_by_the_engine(server: Running, steps: HeldSteps, senders: Senders) -> None:
    """One request makes a step whenever its HTTP thread waits, until the engine sent two parts. The
    first one has no text where the stream had begun before its first token."""
    senders.clear()
    wait_until(lambda: waiting(server) == 1)
    steps.allow(1)
    wait_until(lambda: running(server) == 1)
    (stream,) = server.service.model.driver._streams.values()
    while senders[ENGINE] < 2:
        wait_until(lambda: stream._events._offer is not None)
        steps.allow(1)
        wait_until(lambda: steps.left == 0)


def stalled(server: Running) -> bool:
    """Whether a stream that nobody takes from waits."""
    streams = server.service.model.driver._streams
    return any(stream._stalled for stream in list(streams.values()))


@pytest.mark.parametrize("reset", [True, False])
def test_who_leaves_between_two_steps_frees_its_slot(serve, monkeypatch, senders, reset):
    """Whether its end says so or is just gone; another goes on untouched."""
    with serve() as server:
        http = Http(server.url)
        alone = http.post(COMPLETIONS, STREAMED).body
        steps = hold_steps(monkeypatch)
        with ThreadPoolExecutor(1) as background:
            with http.connected() as connection:
                connection.sendall(posted(COMPLETIONS, {**STREAMED, "max_tokens": 240}))
                sent_by_the_engine(server, steps, senders)
                heard_until(connection, b"\n\n")
                other = background.submit(http.post, COMPLETIONS, STREAMED)
                wait_until(lambda: waiting(server) == 1)
                steps.allow(2)
                wait_until(lambda: running(server) == 2)
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            steps.allow(50)
            wait_until(lambda: running(server) <= 1)
            assert text_of(other.result().body) == text_of(alone)
        wait_until(lambda: server.service.ledger.total(LOCAL_TENANT).abandoned == 1)
        assert server.service.ledger.total(LOCAL_TENANT).completed == 2


def test_who_leaves_while_its_token_is_told(serve, monkeypatch, caplog):
    """The engine does not mind, and nobody reports a fault."""
    receive = Generation.received
    left = threading.Event()

    def leave(generation: Generation, events: Any) -> Any:
        pieces = receive(generation, events)
        if threading.current_thread().name == ENGINE and not left.is_set():
            left.set()
            for channel in list(server.http._server.active_channels.values()):
                channel.connected = False
        return pieces

    monkeypatch.setattr(Generation, "received", leave)
    with serve() as server:
        step_when_all_wait(server, monkeypatch)
        http = Http(server.url)
        with http.connected() as connection:
            connection.sendall(posted(COMPLETIONS, {**STREAMED, "max_tokens": 240}))
            assert left.wait(PATIENCE_SECONDS)
            wait_until(lambda: running(server) == 0)
        wait_until(lambda: server.service.ledger.total(LOCAL_TENANT).abandoned == 1)
        assert http.post(COMPLETIONS, STREAMED).body.endswith(b"data: [DONE]\n\n")
    assert "Traceback" not in caplog.text
    assert "failed" not in caplog.text


@pytest.mark.parametrize("nth", [3, 9])
def test_a_fault_between_two_steps_is_its_requests_alone(serve, monkeypatch, senders, nth):
    """Its client is told, and another's stream is whole."""
    with serve() as server:
        http = Http(server.url)
        alone = http.post(COMPLETIONS, STREAMED).body
        faulty = {**STREAMED, "prompt": "xyz", "max_tokens": 200}
        receive, count = Generation.received, iter(range(10**6))

        def fail(generation: Generation, events: Any) -> Any:
            mine = generation.choices[0].request.max_tokens == 200
            if mine and threading.current_thread().name == ENGINE and next(count) == nth:
                raise RuntimeError
            return receive(generation, events)

        monkeypatch.setattr(Generation, "received", fail)
        step_when_all_wait(server, monkeypatch)
        with ThreadPoolExecutor(2) as clients:
            failed = clients.submit(http.post, COMPLETIONS, faulty)
            whole = clients.submit(http.post, COMPLETIONS, STREAMED)
            assert text_of(whole.result().body) == text_of(alone)
            body = failed.result().body
        assert b'"code":"internal_error"' in body
        assert b"[DONE]" not in body
        assert body.count(b"data: ") > 1
        wait_until(lambda: running(server) == 0)
        total = server.service.ledger.total(LOCAL_TENANT)
        assert (total.completed, total.failed) == (2, 1)


def test_the_end_of_the_server_is_told_to_who_is_told_by_the_engine(
    serve, monkeypatch, senders, patient_end
):
    steps = hold_steps(monkeypatch)
    with serve() as server:
        http = Http(server.url)
        with http.connected() as connection:
            connection.sendall(posted(COMPLETIONS, {**STREAMED, "max_tokens": 240}))
            sent_by_the_engine(server, steps, senders)
            heard_until(connection, b"\n\n")
            server.drain(0)
            heard = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b'"code":"engine_stopped"' in heard
        assert heard.endswith(b"0\r\n\r\n")


def test_pipelined_requests_are_answered_in_order(http, senders):
    """One that is sent before the first answer ended. A stream ends its connection."""
    with http.connected() as connection:
        connection.sendall(
            posted(COMPLETIONS, ASKED) + closing_after(posted(COMPLETIONS, STREAMED))
        )
        heard = b"".join(iter(lambda: connection.recv(65536), b""))
    assert heard.count(b"HTTP/1.1 200 OK") == 2
    assert unchunked(heard[heard.rindex(b"HTTP/1.1") :]).endswith(b"data: [DONE]\n\n")


def test_old_http_gets_the_stream_by_the_other_way(http, senders):
    """Without parts there is nothing that tells where one ends."""
    request = posted(COMPLETIONS, STREAMED).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    answer = http.raw(request).partition(b"\r\n\r\n")[2]
    assert text_of(answer) == text_of(http.post(COMPLETIONS, STREAMED).body)
    assert all(not line or line.startswith((b"data: ", b":")) for line in answer.split(b"\n"))
    assert answer.endswith(b"data: [DONE]\n\n")
