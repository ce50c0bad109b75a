"""More streams than slots, and more clients than places: who waits, who is refused, who suffers.

Waiting is counted in steps of the engine, which are the same on a busy machine."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from contract.types import LOCAL_TENANT, Request, Tenant, TokenEvent
from harness.serve import listen
from harness.serve.keys import new_key
from harness.serve.run import Running
from reference.engine import Engine
from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http, bearer, posted
from tests.serve.tenants import write_tenants
from tests.serve.test_connections import COMPLETIONS

STREAMS = 200
KINDS = 8
HONEST_REQUESTS = 3
HONEST_TOKENS = 24
CROWD_TOKENS = 16
"""Who comes to slots that are all taken waits for the end of an answer, at most as long as this."""
OVERLOAD = 10
SLOTS, DEPTH = 4, 14
URGENT, EQUAL, FLOODER = new_key(), new_key(), new_key()


def asked(kind: int) -> dict[str, object]:
    """What a client of a kind asks."""
    return {
        "prompt": "a stream among many"[: 8 + kind], "max_tokens": 2 + kind, "temperature": 0.9,
        "seed": kind, "ignore_eos": True, "stream": True,
    }  # fmt: skip


def text_of(answer: bytes) -> str:
    """The text of a whole stream, which ended as it should."""
    assert answer.endswith(b"data: [DONE]\n\n")
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    choices = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


async def heard(address: tuple[str, int], kind: int) -> bytes:
    """A whole stream, read by a client that does nothing else."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(posted(COMPLETIONS, asked(kind)))
    answer = await reader.readuntil(b"[DONE]\n\n")
    writer.close()
    return answer


def test_two_hundred_streams_at_once(serve, monkeypatch):
    """All are taken, none is cut, and each says what it says when it is alone."""
    begin = threading.Event()
    step = Engine.step

    def held(engine: Engine) -> object:
        begin.wait(0.01)
        return step(engine) if begin.is_set() else []

    with serve(queue_depth=STREAMS) as server:
        http = Http(server.url)
        alone = [text_of(http.post(COMPLETIONS, asked(kind)).body) for kind in range(KINDS)]
        assert len(set(alone)) == KINDS
        monkeypatch.setattr(Engine, "step", held)

        async def all_of_them() -> list[bytes]:
            clients = [
                asyncio.create_task(heard(http.address, number % KINDS))  # type: ignore[arg-type]
                for number in range(STREAMS)
            ]
            await asyncio.to_thread(wait_until, lambda: in_flight(server) == STREAMS)
            begin.set()
            return await asyncio.gather(*clients)

        answers = asyncio.run(all_of_them())
        assert [text_of(answer) for answer in answers] == alone * (STREAMS // KINDS)
        wait_until(lambda: server.service.ledger.total(LOCAL_TENANT).completed == STREAMS + KINDS)
        assert in_flight(server) == 0


def in_flight(server: Running) -> int:
    """Requests that run or wait."""
    now = server.service.model.driver.call(lambda engine: engine.statistics)
    return now.running + now.waiting


@contextmanager
def flooded(url: str, clients: int) -> Iterator[list[dict[str, int]]]:
    """A process of so many clients that ask without end; what they were answered comes last."""
    line = [
        *(sys.executable, "-m", "tests.serve.flood", url, FLOODER),
        str(clients),
        str(CROWD_TOKENS),
    ]
    told: list[dict[str, int]] = []
    with subprocess.Popen(
        line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield told
        told.append(json.loads(process.communicate("")[0]))


class Steps:
    """How many steps of the engine requests took, from their coming to their last token: however
    long it took them to come, and their answers to be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: defaultdict[int, list[int]] = defaultdict(list)
        """By tenant."""
        self._began: dict[int, tuple[int, int]] = {}
        submit, step = Engine.submit, Engine.step

        def submitted(engine: Engine, request: Request, *more: Any, **named: Any) -> None:
            submit(engine, request, *more, **named)
            self._began[request.id] = request.tenant, engine.statistics.steps

        def stepped(engine: Engine) -> Sequence[TokenEvent]:
            events = step(engine)
            for event in events:
                if event.finish_reason is not None and event.request_id in self._began:
                    tenant, began = self._began.pop(event.request_id)
                    self.taken[tenant].append(engine.statistics.steps - began)
            return events

        monkeypatch.setattr(Engine, "submit", submitted)
        monkeypatch.setattr(Engine, "step", stepped)

    def of_requests(self, server: Running, key: str, tenant: int) -> list[int]:
        """For each of some requests, one after the other, with the key of a tenant."""
        http = Http(server.url)
        body = {"prompt": "honest", "max_tokens": HONEST_TOKENS, "ignore_eos": True, "seed": 1}
        before = len(self.taken[tenant])
        texts = set()
        for _ in range(HONEST_REQUESTS):
            answer = http.post(COMPLETIONS, body, **bearer(key)).answer
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 1
        taken = self.taken[tenant][before:]
        assert len(taken) == HONEST_REQUESTS
        return taken


def test_ten_times_the_load_of_one_costs_others_little(serve, tmp_path, monkeypatch):
    """The crowd waits, and beyond its places is told when to come back: some are left for others,
    so never 503. Others are never refused, and the slowest of their requests takes at most twice
    the steps of the slowest without."""
    keys = {"urgent": URGENT, "equal": EQUAL, "crowd": FLOODER}
    path = write_tenants(tmp_path, keys, urgent={"qos": "interactive"})
    monkeypatch.setattr(listen, "SILENT_SECONDS", PATIENCE_SECONDS)
    steps = Steps(monkeypatch)
    with serve(slots=SLOTS, queue_depth=DEPTH, tenants=path) as server:
        quiet = steps.of_requests(server, EQUAL, 2)
        with flooded(server.url, OVERLOAD * (SLOTS + DEPTH)) as told:
            wait_until(lambda: in_flight(server) >= SLOTS + DEPTH // 2)
            urgent = steps.of_requests(server, URGENT, 1)
            equal = steps.of_requests(server, EQUAL, 2)
            crowd = Tenant(3, "crowd")
            wait_until(lambda: server.service.ledger.total(crowd).rejected > 10 * OVERLOAD)
    assert set(told[0]) == {"200", "429"}
    assert told[0]["429"] > OVERLOAD
    assert max(urgent) <= 1.5 * max(quiet)
    assert max(equal) <= 2 * max(quiet)
