"""A token counts once it was handed out and is part of its answer, wherever tokens are counted; and
a changed file of tenants is in force whole."""

from collections.abc import Callable
from pathlib import Path

from harness.serve import accounts
from harness.serve.keys import new_key
from harness.serve.run import Running
from reference.engine import Engine
from tests.serve.http import Http
from tests.serve.tenants import write_tenants

ALICE, BOB = new_key(), new_key()
HEADERS = {"Authorization": f"Bearer {ALICE}"}


def tenants_file(folder: Path, *, alice: int = 2, bob: int = 12) -> Path:
    pages = {"alice": {"reserved_pages": alice}, "bob": {"reserved_pages": bob}}
    return write_tenants(folder, {"alice": ALICE, "bob": BOB}, **pages)


def in_engine(server: Running, work: Callable[[Engine], object]) -> object:
    return server.service.model.driver.call(work)


def test_reservations_that_are_exchanged_in_one_file(serve, tmp_path, monkeypatch, caplog):
    """One by one they would be too many on the way; and what is refused changes nothing."""
    monkeypatch.setattr(accounts, "POLL_SECONDS", 0.0)
    path = tenants_file(tmp_path)
    with serve(tenants=path) as server:
        http = Http(server.url)
        pages = server.service.model.limits.pages

        def reserved(engine: Engine) -> list[int]:
            return [engine.tenants[id].reserved_pages for id in (1, 2)]

        tenants_file(tmp_path, alice=2, bob=pages - 3)
        assert http.get("/v1/models", **HEADERS).status == 200
        assert in_engine(server, reserved) == [2, pages - 3]
        tenants_file(tmp_path, alice=pages - 3, bob=2)
        assert http.get("/v1/models", **HEADERS).status == 200
        assert in_engine(server, reserved) == [pages - 3, 2]
        tenants_file(tmp_path, alice=1, bob=pages)
        assert http.get("/v1/models", **HEADERS).status == 200
        assert in_engine(server, reserved) == [pages - 3, 2]
        assert in_engine(server, lambda engine: engine.memory.available(2)) == 3
        assert "the tenants stay as they were" in caplog.text
