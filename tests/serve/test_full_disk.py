"""A disk that fills while the server runs: what it refuses, what it keeps, and that it recovers."""

import errno
import io
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.types import LOCAL_TENANT, Tenant
from harness import replay
from harness.serve import service, storage
from harness.serve.ledger_store import Counts, LedgerStore
from harness.serve.responses.store import ResponseStore
from harness.trace import framing
from tests.patience import wait_until
from tests.serve.conftest import wait_for_rest
from tests.serve.http import Http

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
SEVEN, EIGHT = Tenant(7, "seven"), Tenant(8, "eight")
ASKED = {"prompt": "abc", "max_tokens": 3}
TURNS = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


class FullDisk:
    """A connection to SQLite that has no room for ``writes`` while ``full``."""

    writes: tuple[str, ...] = ("INSERT", "PRAGMA user_version=", "COMMIT")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.full = False
        self.refused = 0

    def execute(self, text: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if self.full and text.startswith(self.writes):
            self.refused += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._connection.execute(text, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    """The file is tried with every request."""
    monkeypatch.setattr("harness.serve.storage.RETRY_SECONDS", 0.0)


def test_a_ledger_without_room_refuses_before_anything_is_computed(serve, caplog):
    """The routes that compute and ``/ready``; then it goes on by itself, and nothing was lost."""
    with serve() as server:
        http = Http(server.url)
        assert http.post(COMPLETIONS, ASKED).status == 200
        ledger = server.service.ledger
        disk = ledger._file = FullDisk(ledger._file)  # type: ignore[assignment]
        disk.full = True
        steps = server.service.model.driver.call(lambda engine: engine.statistics.steps)
        for path, body in (
            (COMPLETIONS, ASKED),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/score", {"input": "ab"}),
        ):
            reply = http.post(path, body)
            assert (reply.status, reply.error["code"]) == (503, "disk_full")
            assert reply.headers["Retry-After"]
        assert http.get("/ready").error["code"] == "disk_full"
        assert http.get("/health").status == 200
        assert http.get("/v1/tenants/local/usage").json["total"]["completed"] == 1
        assert server.service.model.driver.call(lambda e: e.statistics.steps) == steps
        assert disk.refused
        assert sum("requests are refused" in line for line in caplog.messages) == 1
        assert "Traceback" not in caplog.text
        disk.full = False
        assert http.get("/ready").status == 200
        assert http.post(COMPLETIONS, ASKED).status == 200
        total = ledger.total(LOCAL_TENANT)
        assert (total.completed, total.rejected, total.requests) == (2, 5, 7)


def test_receipts_without_room_refuse_before_anything_is_computed(serve, tmp_path, caplog):
    """Also where there is room for something and not for a receipt."""
    with serve(receipts=tmp_path) as server:
        http = Http(server.url)
        assert http.post(COMPLETIONS, ASKED).json["x_zinc"]["receipt"]
        store = server.service.receipts
        assert store is not None
        disk = store._file = FullDisk(store._file)  # type: ignore[assignment]
        disk.full = True
        steps = server.service.model.driver.call(lambda engine: engine.statistics.steps)
        for stream in (False, True):
            reply = http.post(COMPLETIONS, {**ASKED, "stream": stream})
            assert (reply.status, reply.error["code"]) == (503, "disk_full")
        assert http.get("/ready").error["code"] == "disk_full"
        assert server.service.model.driver.call(lambda e: e.statistics.steps) == steps
        assert http.post(COMPLETIONS, {**ASKED, "receipt": False}).status == 200
        disk.full = False
        assert http.get("/ready").status == 200
        disk.full, disk.writes = True, ("INSERT",)
        assert http.post(COMPLETIONS, ASKED).error["code"] == "disk_full"
        store._needed_bytes = 1 << 60
        steps = server.service.model.driver.call(lambda engine: engine.statistics.steps)
        assert http.post(COMPLETIONS, ASKED).error["code"] == "disk_full"
        assert server.service.model.driver.call(lambda e: e.statistics.steps) == steps
        disk.full, store._needed_bytes = False, 0
        assert http.post(COMPLETIONS, ASKED).json["x_zinc"]["receipt"]
        assert sum("requests are refused" in line for line in caplog.messages) == 2
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, ASKED), ("/completion", ASKED), ("/v1/messages", {**TURNS, "max_tokens": 2}),
    ("/api/chat", {**TURNS, "options": {"num_predict": 2}}), ("/v1/responses", {"input": "a"}),
])  # fmt: skip
def test_an_answer_without_room_for_its_receipt_failed_once(
    serve, tmp_path, monkeypatch, path, body, stream
):
    """Also in the formats that do not name the receipt."""

    def full(*_: object) -> None:
        raise storage.StorageProblem("the receipts cannot be used: no room", full=True)

    monkeypatch.setattr(service, "store_answer", full)
    with serve(receipts=tmp_path) as server:
        reply = Http(server.url).post(path, {**body, "stream": stream})
        assert reply.status == (200 if stream else 503), reply.body
        assert b"no room" in reply.body
        wait_for_rest(server)
        total = server.service.ledger.total(LOCAL_TENANT)
        assert (total.requests, total.failed, total.rejected) == (1, 1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_stored_failed_once(serve, monkeypatch, stream):
    def full(*_: object) -> None:
        raise storage.StorageProblem("the responses cannot be used: no room", full=True)

    with serve() as server:
        monkeypatch.setattr(server.service.responses, "put", full)
        reply = Http(server.url).post(RESPONSES, {"input": "a", "stream": stream})
        assert b"no room" in reply.body
        wait_for_rest(server)
        total = server.service.ledger.total(LOCAL_TENANT)
        assert (total.requests, total.failed, total.completed) == (1, 1, 0)


def test_what_was_computed_when_the_disk_filled_is_answered(serve):
    """It is counted as soon as there is room."""
    with serve() as server:
        http = Http(server.url)
        ledger = server.service.ledger
        disk = ledger._file = FullDisk(ledger._file)  # type: ignore[assignment]
        finish = server.service.ledger.add

        def fills(tenant: Tenant, counts: Counts) -> None:
            disk.full = True
            finish(tenant, counts)

        ledger.add = fills  # type: ignore[method-assign]
        assert http.post(COMPLETIONS, ASKED).status == 200
        assert ledger.total(LOCAL_TENANT).requests == 0
        disk.full = False
        assert http.get("/ready").status == 200
        assert ledger.total(LOCAL_TENANT).completed == 1


def test_counts_that_waited_are_written_at_the_end(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with LedgerStore(path) as ledger:
        disk = ledger._file = FullDisk(ledger._file)  # type: ignore[assignment]
        disk.full = True
        for _ in range(3):
            ledger.add(SEVEN, Counts(requests=1, prompt_tokens=5))
        disk.full = False
    with LedgerStore(path) as ledger:
        assert ledger.total(SEVEN) == Counts(requests=3, prompt_tokens=15)


@pytest.mark.parametrize("full", [False, True])
def test_requests_that_end_together_share_a_transaction(tmp_path, full):
    """Whether it succeeds or not: 64 streams that end in one step wait for one write."""
    path = tmp_path / "ledger.sqlite"
    with LedgerStore(path) as ledger, ThreadPoolExecutor(16) as threads:
        disk = ledger._file = FullDisk(ledger._file)  # type: ignore[assignment]
        disk.full = full
        said: list[str] = []
        disk.set_trace_callback(said.append)
        with ledger._lock:
            ends = [
                threads.submit(ledger.add, tenant, Counts(requests=1, prompt_tokens=5))
                for tenant in (SEVEN, SEVEN, EIGHT) * 5
            ]
            wait_until(lambda: ledger._counted == len(ends))
        for end in ends:
            end.result()
        disk.set_trace_callback(None)
        assert sum(line.startswith("BEGIN") for line in said) == 1
        assert ledger.total(SEVEN) == (Counts() if full else Counts(requests=10, prompt_tokens=50))
        disk.full = False
    with LedgerStore(path) as ledger:
        assert ledger.total(SEVEN) == Counts(requests=10, prompt_tokens=50)
        assert ledger.total(EIGHT) == Counts(requests=5, prompt_tokens=25)


def test_a_problem_that_goes_on_is_one_line_a_minute(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: now))
    noted = storage.ProblemLog()
    for _ in range(125):
        noted.note("full")
        now += 1.0
    assert len(caplog.records) == 3
    noted.note(None)
    noted.note(None)
    assert len(caplog.records) == 4


class FullFile(io.FileIO):
    """A file that has room for ``room`` more bytes."""

    room = 1 << 40

    def write(self, data: Any) -> int:
        if not FullFile.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data)[: FullFile.room]
        FullFile.room -= len(part)
        return super().write(part)


def test_a_trace_without_room_refuses_and_then_goes_on(serve, tmp_path, monkeypatch, capsys):
    """The trace is whole in the end: what ran while the disk was full is in it."""
    monkeypatch.setattr(FullFile, "room", 1 << 40)
    monkeypatch.setattr(Path, "open", _opened(Path.open))
    folder = tmp_path / "traces"
    with serve(record=folder) as server:
        http = Http(server.url)
        assert http.post(COMPLETIONS, ASKED).status == 200
        FullFile.room = 100
        first = http.post(COMPLETIONS, ASKED)
        assert first.status == 200
        for _ in range(2):
            refused = http.post(COMPLETIONS, ASKED)
            assert (refused.status, refused.error["code"]) == (503, "disk_full")
        assert http.get("/ready").error["code"] == "disk_full"
        FullFile.room = 1 << 40
        assert http.get("/ready").status == 200
        assert http.post(COMPLETIONS, ASKED).status == 200
    (trace,) = folder.iterdir()
    assert replay.main([str(trace), "--tier", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("identical: ")


def _opened(real: Any) -> Any:
    def opened(path: Path, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        if mode == "xb" and buffering == 0:
            return FullFile(path, "x")
        return real(path, mode, buffering, **more)

    return opened


def test_a_file_that_waits_too_long_is_an_error(tmp_path, monkeypatch):
    """Memory is bounded, and every byte that was taken is written in order."""
    monkeypatch.setattr(framing, "MAX_WAITING_BYTES", 1 << 17)
    monkeypatch.setattr(Path, "open", _opened(Path.open))
    monkeypatch.setattr(FullFile, "room", 1000)
    file = framing.PatientFile(tmp_path / "t")
    written = bytes(n % 251 for n in range(1 << 17))
    for start in range(0, len(written), 1 << 10):
        file.write(written[start : start + (1 << 10)])
    with pytest.raises(OSError, match="No space"):
        file.write(b"x" * 2000)
    written += b"x" * 2000
    assert file.problem
    FullFile.room = 1 << 40
    file.close()
    assert (tmp_path / "t").read_bytes() == written


def test_responses_without_room_are_refused_before_anything_is_computed(serve, tmp_path, caplog):
    """Only those that are to be stored; what is stored can be read, and it goes on by itself."""
    body = {"input": "a", "max_output_tokens": 2}
    with serve(state=tmp_path) as server:
        http = Http(server.url)
        first = http.post(RESPONSES, body).json["id"]
        store = server.service.responses
        disk = store._file = FullDisk(store._file)  # type: ignore[assignment]
        disk.full = True
        for _ in range(2):
            refused = http.post(RESPONSES, body)
            assert (refused.status, refused.error["code"]) == (503, "disk_full")
        steps = server.service.model.driver.call(lambda engine: engine.statistics.steps)
        assert http.post(RESPONSES, body).status == 503
        assert server.service.model.driver.call(lambda e: e.statistics.steps) == steps
        more = {**body, "store": False, "previous_response_id": first}
        assert http.post(RESPONSES, more).status == 200
        assert http.get(f"{RESPONSES}/{first}").status == 200
        refusals = [line for line in caplog.messages if "refused" in line]
        assert len(refusals) == 1
        assert refusals[0].startswith("answers to be stored are refused: ")
        disk.full = False
        assert http.post(RESPONSES, body).status == 200


class KeepsRoom(FullDisk):
    """A disk that has no room but what the file ``kept`` takes."""

    writes = ("INSERT", "DELETE", "COMMIT")

    def __init__(self, connection: sqlite3.Connection, kept: Path) -> None:
        self.kept = kept
        super().__init__(connection)

    @property
    def full(self) -> bool:
        return self.kept.exists()

    @full.setter
    def full(self, full: bool) -> None:
        pass

    def executemany(self, text: str, values: Any) -> sqlite3.Cursor:
        for one in values:
            self.execute(text, one)
        return self._connection.cursor()


def test_what_is_stored_can_be_deleted_on_a_full_disk(serve, tmp_path):
    """By the room that is kept for it, which is taken again, and for ever."""
    body = {"input": "a", "max_output_tokens": 2}
    with serve(state=tmp_path) as server:
        http = Http(server.url)
        stored = [http.post(RESPONSES, body).json["id"] for _ in range(4)]
        store = server.service.responses
        (kept,) = tmp_path.glob("*.reserve")
        assert kept.stat().st_size > 0
        store._file = KeepsRoom(store._file, kept)  # type: ignore[assignment]
        for id in stored[:2]:
            assert http.send("DELETE", f"{RESPONSES}/{id}", None, {}).json["deleted"]
            assert http.get(f"{RESPONSES}/{id}").status == 404
            assert kept.exists()
        assert http.send("DELETE", f"{RESPONSES}/{id}", None, {}).status == 404
        assert http.post(RESPONSES, body).error["code"] == "disk_full"
        store.forget_others([])
    with ResponseStore(tmp_path) as again:
        assert again._file.execute("SELECT COUNT(*) FROM responses").fetchone() == (0,)


def test_a_delete_without_any_room_says_so_and_deletes_nothing(serve, tmp_path):
    with serve(state=tmp_path) as server:
        http = Http(server.url)
        path = (
            f"{RESPONSES}/{http.post(RESPONSES, {'input': 'a', 'max_output_tokens': 2}).json['id']}"
        )
        store = server.service.responses
        disk = store._file = FullDisk(store._file)  # type: ignore[assignment]
        disk.full = True
        refused = http.send("DELETE", path, None, {})
        assert (refused.status, refused.error["code"]) == (503, "disk_full")
        assert http.get(path).status == 200
        disk.full = False
        assert http.send("DELETE", path, None, {}).json["deleted"]
