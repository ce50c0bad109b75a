"""Several engines as one, under Ray Serve: a stream outlives the replica it began on."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from contract.types import Request
from harness.host.remote.receivers import Receivers
from harness.host.remote.work import Work
from harness.host.watch import RequestFacts
from harness.serve.receipts.document import parse_receipt
from harness.serve.receipts.verify import ReceiptDemands, verify_receipts
from harness.serve.replicas.work import AnswerEnd, RequestUpdate
from tests.needs import need_installed
from tests.patience import PROCESS_SECONDS, wait_until
from tests.serve.dialect_streams import EVENTS, NAMED, OTHER_DIALECTS, TOKENS, streamed_of, whole_of
from tests.serve.http import Http, posted
from tests.serve.test_connections import COMPLETIONS
from tests.serve.test_process import process

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
Served = tuple[psutil.Process, Http, list[str]]
CHAT = "/v1/chat/completions"
STREAMS = 8


def asked(number: int, stream: bool) -> dict[str, object]:
    """What client ``number`` asks: sampled, penalized, with digests, some with the prompt."""
    return {
        "echo": number % 4 == 3, "logits_digest": True,
        "stream_options": {"include_usage": True} if stream else None,
        "prompt": "the quick brown fox"[: 10 + number], "max_tokens": TOKENS, "temperature": 0.9,
        "repetition_penalty": 1.2 if number % 2 else 1.0, "logprobs": 2, **NAMED, "seed": number,
        "ignore_eos": True, "stream": stream,
    }  # fmt: skip


class Listener:
    """A stream, read in a thread of its own up to what it ``ends`` with."""

    def __init__(self, connection: socket.socket, ends: bytes = b"[DONE]") -> None:
        self.heard, self._ends = b"", ends
        self._connection = connection
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while self._ends not in self.heard or not self.heard.endswith(b"\n"):
            part = self._connection.recv(65536)
            if not part:
                return
            self.heard += part

    @property
    def tokens(self) -> int:
        """How many have come."""
        return self.heard.count(b'"token_logprobs":[')

    def content(self) -> str:
        """The content of a message, when it has ended."""
        self._thread.join()
        lines = [line for line in self.heard.split(b"\n") if line.startswith(b"data: {")]
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert b"data: [DONE]" in self.heard
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks)

    def events(self) -> list[dict[str, Any]]:
        """The objects of the stream of another API, when it has ended."""
        self._thread.join()
        lines = [line.removeprefix(b"data: ") for line in self.heard.split(b"\n")]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def told(self) -> tuple[str, list[str], list[float], list[str]]:
        """Text, tokens and log-probabilities, and the digest of the logits, when it has ended."""
        self._thread.join()
        lines = [line for line in self.heard.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]", lines[-1]
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        return (
            "".join(choice["text"] for choice in choices),
            [token for one in logprobs for token in one["tokens"]],
            [value for one in logprobs for value in one["token_logprobs"]],
            chunks[-1]["x_zinc"]["logits_sha256"],
        )


@pytest.fixture(scope="module")
def served(tiny_model_path, tmp_path_factory) -> Iterator[Served]:
    """A server on two replicas, the processes of the replicas, and what it logs."""
    need_installed("ray", "ray")
    folder = tmp_path_factory.mktemp("ray")
    logged: list[str] = []
    words = ("--ray", "2", "--slots", str(STREAMS), "--receipts", str(folder / "receipts"))
    words += ("--alias", "tiny")
    with process(tiny_model_path, folder, *words) as (server, http):
        reader = threading.Thread(target=lambda: logged.extend(server.stderr or ()), daemon=True)
        reader.start()
        yield psutil.Process(server.pid), http, logged
        server.terminate()
        server.wait(PROCESS_SECONDS)


def replicas(server: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in server.children(recursive=True):
        try:
            if "ServeReplica" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def moved_after(logged: list[str]) -> list[int]:
    """How many tokens each stream had that lost its replica, as the server logs it."""
    return [int(found[1]) for one in logged if (found := re.search(r"elsewhere after (\d+)", one))]


def busiest(server: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """The replica that computes, and the other one, while only one of them has requests."""
    both = replicas(server)
    begun = [one.cpu_times().user for one in both]

    def used() -> list[float]:
        return [one.cpu_times().user - at for one, at in zip(both, begun, strict=True)]

    wait_until(lambda: max(used()) > 0.1 + 4 * min(used()))
    first, second = used()
    return (both[0], both[1]) if first > second else (both[1], both[0])


def test_streams_go_on_where_a_replica_dies(served):
    """Without a seam: the same text, tokens and log-probabilities as when nothing happens."""
    server, http, logged = served
    victim, _ = replicas(server)
    alone = []
    for number in range(STREAMS):
        whole = http.post(COMPLETIONS, asked(number, stream=False)).json
        choice, digests = whole["choices"][0], whole["x_zinc"]["logits_sha256"]
        tokens, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        alone.append((choice["text"], tokens, values, digests))
    with ExitStack() as opened:
        listeners = []
        for number in range(STREAMS):
            connection = opened.enter_context(http.connected(120))
            connection.sendall(posted(COMPLETIONS, asked(number, stream=True)))
            listeners.append(Listener(connection))
        wait_until(lambda: all(listener.tokens for listener in listeners))
        victim.kill()
        assert [listener.told() for listener in listeners] == alone
    moved = moved_after(logged)
    assert moved, "nothing ran on the replica that was killed"
    assert all(0 < tokens < TOKENS for tokens in moved), moved


def test_what_is_asked_of_all_engines_is_summed(served):
    """Slots of both, and of a tenant what it was given by any; refusals are as ever."""
    server, http, _ = served
    wait_until(lambda: len(replicas(server)) == 2)
    assert http.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 2}).status == 200
    usage = http.get("/v1/tenants/local/usage").answer
    assert usage["total"]["completed"] >= 1
    assert http.get("/health").json["active"] == 0
    assert http.post(COMPLETIONS, {"prompt": list(range(300))}).error["param"] == "prompt"
    assert b"zinc_rt:num_requests_running" in http.get("/metrics").body


def test_tokens_behind_the_end_of_an_answer_count_on_no_replica(served):
    """Behind a stop string, and of a client that leaves: the replicas' ledgers are the server's."""
    _, http, _ = served

    def counted() -> tuple[int, int]:
        usage = http.get("/v1/tenants/local/usage").json
        return usage["total"]["completion_tokens"], usage["since_start"]["tokens_generated"]

    def difference() -> int:
        """What the replicas count beyond the server; what dead ones counted is gone."""
        stored, since_start = counted()
        return since_start - stored

    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "seed": 5}
    wait_until(lambda: not live(http))
    begun = counted()[0]
    text = http.post(COMPLETIONS, body).json["choices"][0]["text"]
    wait_until(lambda: counted()[0] >= begun + 60)
    before, stored = difference(), counted()[0]
    for at in (3, len(text) // 2, len(text) - 3):
        for stream in (False, True):
            cut = http.post(COMPLETIONS, {**body, "stop": text[at : at + 2], "stream": stream})
            assert cut.status == 200
    with http.connected(120) as connection:
        connection.sendall(posted(COMPLETIONS, {**asked(0, stream=True), "stop": "never comes"}))
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
    wait_until(lambda: difference() == before and counted()[0] > stored)
    assert 0 < counted()[0] - stored < 6 * 60 + 1000
    metrics = http.get("/metrics").body.decode()
    (generated,) = re.findall(r"^zinc_rt:generation_tokens_total\S+ (\S+)$", metrics, re.M)
    assert float(generated) == counted()[0]


FORMAT = {"type": "regex", "regex": "([ab]{2} ){60}"}


def chat(seed: int, stream: bool) -> dict[str, object]:
    """An answer of a form, which takes a while."""
    return {
        "messages": [{"role": "user", "content": "go"}], "response_format": FORMAT,
        "max_tokens": 190, "temperature": 1.0, **NAMED, "seed": seed, "stream": stream,
    }  # fmt: skip


def test_replicas_answer_as_one_engine_does(served, server):
    """To the byte: formats, prompts' log-probabilities, digests and vectors."""
    _, http, _ = served
    alone = Http(server.url)
    scoring = {"prompt": "how likely is it?", "echo": True, "logprobs": 2, "max_tokens": 0}
    for path, body in (
        (COMPLETIONS, {**asked(3, stream=False), "max_tokens": 20}),
        (COMPLETIONS, scoring),
        (CHAT, {**chat(1, stream=False), "max_tokens": 20}),
        ("/v1/embeddings", {"input": ["one", "another text", "three"]}),
        ("/v1/score", {"input": ["one", "another text", "three"], "top": 2, "start": [1, 3, 2]}),
    ):
        there, here = (one.post(path, body) for one in (http, alone))
        assert there.status == here.status == 200, there.body
        for key in ("choices", "data"):
            assert there.json.get(key) == here.json.get(key), path
        assert there.json["x_zinc"].get("logits_sha256") == here.json["x_zinc"].get("logits_sha256")
    bad = {**chat(1, stream=False), "response_format": {"type": "regex", "regex": "("}}
    assert http.post(CHAT, bad).error == alone.post(CHAT, bad).error
    long = {"input": ["one", "long " * 300]}
    assert http.post("/v1/embeddings", long).error["param"] == "input"


def test_answers_of_replicas_have_receipts(served, server):
    """Which verify, with whole rows hashed and without, of streams, texts and results."""
    _, http, _ = served
    model = server.service.model
    for path, body in (
        (COMPLETIONS, {**asked(1, stream=False), "max_tokens": 20}),
        (CHAT, {**chat(2, stream=False), "max_tokens": 20}),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 60, "stop": ["e", "a"], "seed": 1}),
        ("/v1/score", {"input": ["one", "another text"], "top": 2}),
    ):
        noted = http.post(path, body).json["x_zinc"]["receipt"]
        document = http.get(f"/v1/receipts/{noted['id']}").body
        receipt = parse_receipt(document, "the receipt")
        (verdict,) = verify_receipts([receipt], model, ReceiptDemands())
        assert verdict.problems == []


def test_a_format_holds_where_a_replica_dies(served):
    """The masks go on from where the answer has come to."""
    server, http, _ = served
    wait_until(lambda: len(replicas(server)) == 2)
    requested = [
        http.post(CHAT, chat(seed, stream=False)).json["choices"][0]["message"]["content"]
        for seed in range(4)
    ]
    assert all(re.fullmatch(FORMAT["regex"], text) for text in requested)
    with ExitStack() as opened:
        listeners = []
        for seed in range(4):
            connection = opened.enter_context(http.connected(120))
            connection.sendall(posted(CHAT, chat(seed, stream=True)))
            listeners.append(Listener(connection))
        wait_until(lambda: all(one.heard.count(b'"content":"') > 3 for one in listeners))
        replicas(server)[0].kill()
        assert [listener.content() for listener in listeners] == requested


@pytest.mark.parametrize("dies", [False, True], ids=["the idle one", "theirs"])
def test_streams_of_other_dialects_go_on_where_a_replica_dies(served, dies):
    """Their replica is the one that dies: all of them move, and have the text, tokens and events of
    an answer that nothing happens to. Where the other replica dies, none of them moves."""
    server, http, logged = served
    wait_until(lambda: len(replicas(server)) == 2 and not live(http))
    whole = []
    for path, body, _ in OTHER_DIALECTS:
        whole.append(whole_of(path, http.post(path, {**body, "stream": False}).json))
    before = len(moved_after(logged))
    with ExitStack() as opened:
        listeners = []
        for path, body, ends in OTHER_DIALECTS:
            connection = opened.enter_context(http.connected(120))
            connection.sendall(posted(path, {**body, "stream": True}))
            listeners.append(Listener(connection, ends))
        wait_until(lambda: all(listener.heard.count(b"{") > 3 for listener in listeners))
        theirs, idle = busiest(server)
        (theirs if dies else idle).kill()
        streams = [listener.events() for listener in listeners]
    for (path, _, _), events, requested in zip(OTHER_DIALECTS, streams, whole, strict=True):
        assert streamed_of(path, events) == (*requested, EVENTS[path])
    wait_until(lambda: not live(http))
    moved = moved_after(logged)[before:]
    assert len(moved) == (len(OTHER_DIALECTS) if dies else 0), moved
    assert all(0 < tokens < 200 for tokens in moved), moved


def test_who_leaves_frees_the_slot_of_the_replica(served):
    _, http, _ = served
    with http.connected() as connection:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection.sendall(posted(COMPLETIONS, body))
        while b"\ndata:" not in connection.recv(65536):
            pass
    wait_until(lambda: not live(http))


def live(http: Http) -> int:
    """How many requests the server has not ended."""
    found: int = http.get("/v1/tenants/local/usage").json["now"]["live"]
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_request_cancelled_before_its_replica_is_known_counts_no_tokens():
    """Its first update comes after the client has left: the replica hears how long the answer
    is."""
    from harness.serve.replicas.driver import _Pump

    request = Request(7, (3, 4, 5), 12)
    ends: list[AnswerEnd] = []

    class Response:
        """A replica's answer, before whose first update the request is cancelled."""

        def __iter__(self) -> Iterator[RequestUpdate]:
            pump.cancel(0)
            yield RequestUpdate("a replica", (), 0, 0, False, None)  # type: ignore[arg-type]

        def cancel(self) -> None:
            pass

    driver = SimpleNamespace(
        handle=SimpleNamespace(generate=SimpleNamespace(remote=lambda work: Response())),
        end_answer=ends.append,
        forget=lambda pump: None,
    )
    facts = RequestFacts(0.0)
    pump = _Pump(driver, Receivers(Work(request)), facts)  # type: ignore[arg-type]
    pump.run()
    assert ends == [AnswerEnd("a replica", 7, 0)]
