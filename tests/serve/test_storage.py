"""The databases of a server whose disk is full at the start, that break, that go, or that another
process holds."""

import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from contract.errors import ConfigError
from contract.types import Tenant
from harness.serve.errors import ApiError
from harness.serve.ledger_store import Counts, LedgerStore
from harness.serve.receipts.keys import PRIVATE
from harness.serve.receipts.store import FILE as RECEIPTS
from harness.serve.receipts.store import LATEST, ReceiptStore
from harness.serve.responses.store import FILE as RESPONSES
from harness.serve.responses.store import ResponseStore, StoredResponse
from harness.serve.responses.wire import InputItem
from harness.serve.storage import Database, StorageProblem
from tests.full_disk import largest_file
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http

A, B = Tenant(1, "alice"), Tenant(2, "bob")
COUNTS = Counts(requests=1)
BODY = {"input": "a", "max_output_tokens": 2}


def stored(number: int, size: int = 1) -> StoredResponse:
    response = {"id": f"resp_{number}", "output": ["x" * size]}
    return StoredResponse(response, (InputItem(role="user", content=str(number)),), (), None)


class Kept:
    """A database of one kind in a folder: something is ``put`` there, and ``read``."""

    def __init__(self, name: str, make: Callable[[Path], Any], put: Any, read: Any) -> None:
        self.name, self.make, self.put, self.read = name, make, put, read

    def __str__(self) -> str:
        return self.name


def _receipt(store: ReceiptStore) -> None:
    store.add(A.id, {"id": "a", "kind": "x" * 5000, "tenant": {"name": A.name}}, [])


KINDS = [
    Kept(
        "ledger.sqlite",
        lambda folder: LedgerStore(folder / "ledger.sqlite"),
        lambda store: store.add(A, COUNTS),
        lambda store: (store.total(A), store.days(A), store.tenants(), store.activated(Path("a"))),
    ),
    Kept(RECEIPTS, ReceiptStore, _receipt, lambda store: (
        store.find(A, LATEST), store.listed(A, 0, 9), store.tenants(), [*store.exported(1)])),
    Kept(RESPONSES, ResponseStore, lambda store: store.put(A, stored(1, 5000)),
         lambda store: (store.get(A, "resp_1"), store.conversation(A, "resp_1"))),
]  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.mark.parametrize("nbytes", [100, 9000])
def test_what_is_deleted_is_in_no_file(nbytes, tmp_path):
    """For every kind of database: in a part of a page and in pages of its own."""
    path, said = tmp_path / "said.sqlite", "x" * nbytes
    with Database(path, 1, "what was said", "--said", ["CREATE TABLE a (b TEXT)"]) as database:
        database._apply([("INSERT INTO a VALUES (?)", (text,)) for text in ("y", said)])
        database._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert said[:99].encode() in path.read_bytes()
        database._apply([("DELETE FROM a WHERE b = ?", (said,))])
    assert said[:99].encode() not in path.read_bytes()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    """The file is tried with every request."""
    monkeypatch.setattr("harness.serve.storage.RETRY_SECONDS", 0.0)


def break_file(store: Database, path: Path) -> None:
    """Change every page but the first, behind the back of who has it open."""
    store._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._file.execute("PRAGMA cache_size=0")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


@kinds
def test_what_is_there_is_read_where_the_disk_is_full_at_the_start(kind, tmp_path):
    """What cannot be stored is a problem of storage, and goes on by itself once there is room."""
    with kind.make(tmp_path) as store:
        kind.put(store)
        before = kind.read(store)
    with largest_file(0):
        store = kind.make(tmp_path)
        assert kind.read(store) == before
        with pytest.raises(StorageProblem):
            store.check()
        assert kind.read(store) == before
    store.check()
    kind.put(store)
    other = kind.make(tmp_path)
    other.check()
    for each in (store, other):
        each.close()


@kinds
def test_a_database_that_breaks_while_it_is_open_is_a_problem_of_storage(kind, tmp_path, caplog):
    """Whether it is read or written. Moved away, a new one is begun while the server runs."""
    with kind.make(tmp_path) as store:
        for _ in range(20):
            kind.put(store)
        break_file(store, tmp_path / kind.name)
        with pytest.raises(StorageProblem, match="malformed"):
            kind.read(store)
        if isinstance(store, LedgerStore):
            store.add(A, COUNTS)
        else:
            with pytest.raises(StorageProblem, match="malformed"):
                kind.put(store)
        with pytest.raises(StorageProblem):
            store.check()
        (tmp_path / kind.name).rename(tmp_path / "broken")
        store.check()
        assert sum("removed or replaced" in line for line in caplog.messages) == 1
        kind.put(store)
        kind.read(store)
        if isinstance(store, LedgerStore):
            assert store.total(A) == Counts(requests=2), "what was counted meanwhile is kept"


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=str)
def test_a_folder_that_is_removed_is_begun_anew(kind, tmp_path, caplog):
    """The log says so; what is stored from then on is there after a restart."""
    folder = tmp_path / "state"
    with kind.make(folder) as store:
        kind.put(store)
        before = kind.read(store)
        shutil.rmtree(folder)
        store.check()
        kind.put(store)
        assert sum("removed or replaced" in line for line in caplog.messages) == 1
        folder.rename(tmp_path / "moved")
        folder.write_bytes(b"no folder")
        with pytest.raises(StorageProblem):
            store.check()
        folder.unlink()
        (tmp_path / "moved").rename(folder)
        store.check()
        assert kind.read(store) == before
    with kind.make(folder) as store:
        assert kind.read(store) == before


@pytest.mark.parametrize("lost", ["the folder", "the key", "what the key says"])
def test_without_its_key_a_store_of_receipts_refuses_before_anything_is_computed(lost, tmp_path):
    """No other key is made while the server runs; with the key there it goes on."""
    folder, kept = tmp_path / "receipts", tmp_path / "kept"
    with ReceiptStore(folder) as store:
        _receipt(store)
        shutil.copytree(folder, kept)
        if lost == "the folder":
            shutil.rmtree(folder)
        elif lost == "the key":
            (folder / PRIVATE).unlink()
        else:
            (folder / PRIVATE).write_bytes(b"x")
        for _ in range(2):
            with pytest.raises(StorageProblem, match=r"key\.pem"):
                store.check()
            with pytest.raises(StorageProblem, match=r"key\.pem"):
                _receipt(store)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        store.check()
        _receipt(store)
        store.check()


@kinds
def test_what_is_read_waits_for_no_change(kind, tmp_path, monkeypatch):
    """Neither for one of another process, nor for one that waits for it in this one."""
    monkeypatch.setattr("harness.serve.storage.BUSY_SECONDS", 2 * PATIENCE_SECONDS)
    with kind.make(tmp_path) as store:
        kind.put(store)
        before = kind.read(store)
        other = sqlite3.connect(tmp_path / kind.name, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        said: list[str] = []
        store._file.set_trace_callback(said.append)
        changing = threading.Thread(target=kind.put, args=(store,))
        changing.start()
        wait_until(lambda: any(line.startswith("BEGIN") for line in said))
        assert kind.read(store) == before
        assert changing.is_alive()
        other.execute("ROLLBACK")
        other.close()
        changing.join(PATIENCE_SECONDS)
        assert not changing.is_alive()


RESTORE = """
import fcntl, os, sys
index = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(index, fcntl.LOCK_EX, 8, 120)
os.pwrite(index, bytes(96), 0)
print("restores", flush=True)
sys.stdin.readline()
"""
"""Holds the locks and clears the header of the index that processes share, as SQLite does while it
reads the log of a file whose last user was killed."""


@kinds
@pytest.mark.parametrize("use", ["read", "put"])
def test_the_end_of_a_restoration_is_waited_for(kind, use, tmp_path, monkeypatch):
    """By who reads and by who writes; SQLite has an error number of its own for it."""
    monkeypatch.setattr("harness.serve.storage.BUSY_SECONDS", 2 * PATIENCE_SECONDS)
    with kind.make(tmp_path) as store, ThreadPoolExecutor(1) as users:
        kind.put(store)
        before = kind.read(store)
        said: list[str] = []
        store._file.set_trace_callback(said.append)
        line = [sys.executable, "-c", RESTORE, tmp_path / f"{kind.name}-shm"]
        with subprocess.Popen(line, stdin=PIPE, stdout=PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"restores\n"
            used = users.submit(getattr(kind, use), store)
            # It has asked again, or it has failed.
            wait_until(lambda: used.done() or len(said) > 2)
            assert not used.done(), used.exception()
            other.communicate(b"\n")
        assert used.result() == (before if use == "read" else None)


def test_servers_of_different_tenants_forget_their_own(tmp_path):
    """On one folder: each those of its own file, at its start and later; a file that is gone has
    no tenants."""
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file in files:
        file.touch()
    with ResponseStore(tmp_path) as first, ResponseStore(tmp_path) as second:
        first.forget_others([A], files[0])
        second.forget_others([B], files[1])
        first.put(A, stored(1))
        second.put(B, stored(2))
        first.forget_others([A], files[0])
        second.forget_others([B], files[1])
        assert first.get(A, "resp_1")
        assert second.get(B, "resp_2")
        first.forget_others([], files[0])
        with pytest.raises(ApiError):
            first.get(A, "resp_1")
        assert second.get(B, "resp_2")
        files[1].unlink()
        first.forget_others([A], files[0])
        with pytest.raises(ApiError):
            second.get(B, "resp_2")


def test_a_server_whose_ledger_breaks_answers_503(serve, tmp_path, caplog):
    """What was asked meanwhile is counted once the file is moved away."""
    path = tmp_path / "ledger.sqlite"
    with serve(ledger=path, state=tmp_path) as server:
        http = Http(server.url)
        for number in range(200):
            server.service.ledger.add(Tenant(number, "a"), COUNTS)
        break_file(server.service.ledger, path)
        for method, name in (("GET", "/v1/tenants/local/usage"), ("POST", "/v1/responses")):
            reply = http.post(name, BODY) if method == "POST" else http.get(name)
            assert (reply.status, reply.error["code"]) == (503, "storage_unwritable"), name
        assert http.get("/ready").status == 503
        assert http.get("/health").status == 200
        path.rename(tmp_path / "broken")
        assert http.post("/v1/responses", BODY).status == 200
        total = http.get("/v1/tenants/local/usage").json["total"]
        assert (total["rejected"], total["completed"]) == (1, 1)
        assert "Traceback" not in caplog.text


def test_a_server_starts_where_the_disk_is_full(serve, tmp_path, caplog):
    """It reads what is stored, refuses the rest, and goes on by itself once there is room."""
    options = {"state": tmp_path, "ledger": tmp_path / "ledger.sqlite"}
    with serve(**options) as server:
        first = Http(server.url).post("/v1/responses", BODY).json
    with ExitStack() as owned:
        with largest_file(0):
            http = Http(owned.enter_context(serve(**options)).url)
            assert http.get("/ready").status == 503
            assert http.get(f"/v1/responses/{first['id']}").json == first
            assert http.get("/v1/tenants/local/usage").json["total"]["completed"] == 1
            assert http.post("/v1/responses", BODY).error["code"] == "storage_unwritable"
        assert http.get("/ready").status == 200
        more = BODY | {"previous_response_id": first["id"]}
        assert http.post("/v1/responses", more).status == 200
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kept", KINDS, ids=str)
@pytest.mark.parametrize("version", [0, 1])
def test_another_programs_database_stays_as_it_is(kept, tmp_path, version):
    """It has no version either, or by chance ours."""
    path = tmp_path / kept.name
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE notes (text TEXT)")
        file.execute(f"PRAGMA user_version={version}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another program's database; name another"):
        kept.make(tmp_path)
    assert path.read_bytes() == before
    assert not (tmp_path / f"{kept.name}-wal").exists()
