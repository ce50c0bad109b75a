"""A token counts once it was handed out and is part of its answer, wherever tokens are counted; and
a changed file of tenants is in force whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.serve import accounts
from harness.serve.keys import new_key
from harness.serve.run import Running
from reference.engine import Engine
from tests.serve.conftest import Serve
from tests.serve.http import Http
from tests.serve.tenants import write_tenants

ALICE, BOB = new_key(), new_key()
HEADERS = {"Authorization": f"Bearer {ALICE}"}


def tenants_file(folder: Path, *, alice: int = 2, bob: int = 12) -> Path:
    pages = {"alice": {"reserved_pages": alice}, "bob": {"reserved_pages": bob}}
    return write_tenants(folder, {"alice": ALICE, "bob": BOB}, **pages)


@pytest.fixture(scope="module")
def keyed(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tenants=tenants_file(tmp_path_factory.mktemp("tenants"))) as server:
        yield server


GENERATED = re.compile(r'^zinc_rt:generation_tokens_total{[^}]*"alice"} (\S+)$', re.M)


def counted(server: Running) -> tuple[int, int]:
    """What the stored ledger has of alice, which the metrics have, too, and what is said of the
    time since the start."""
    usage = Http(server.url).get("/v1/tenants/alice/usage", **HEADERS).json
    stored: int = usage["total"]["completion_tokens"]
    generated = GENERATED.search(server.service.metrics.text().decode())
    assert stored == (0 if generated is None else float(generated[1]))
    return stored, usage["since_start"]["tokens_generated"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [20, 90])
def test_tokens_behind_a_stop_string_count_nowhere(
    keyed: Running, stream: bool, length: int
) -> None:
    http = Http(keyed.url)
    body = {"prompt": "abc", "max_tokens": length, "ignore_eos": True, "seed": 5}
    whole = http.post("/v1/completions", body, **HEADERS).json
    text = whole["choices"][0]["text"]
    before = counted(keyed)
    assert before[0] == before[1]
    for at in (3, len(text) // 2, len(text) - 3):
        stop = text[at : at + 2]
        cut = http.post("/v1/completions", {**body, "stop": stop, "stream": stream}, **HEADERS)
        assert cut.status == 200
    after = counted(keyed)
    assert after[0] == after[1]
    assert 0 < after[0] - before[0] < 3 * length


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_a_stop_token_count_nowhere(keyed: Running, stream: bool) -> None:
    http = Http(keyed.url)
    body = {"prompt": "abc", "max_tokens": 90, "ignore_eos": True, "seed": 5, "logprobs": 1}
    whole = http.post("/v1/completions", {**body, "return_token_ids": True}, **HEADERS).json
    before = counted(keyed)
    for at in (2, 40, 80):
        stop = [whole["choices"][0]["token_ids"][at]]
        asked = {**body, "stop_token_ids": stop, "stream": stream}
        assert http.post("/v1/completions", asked, **HEADERS).status == 200
    after = counted(keyed)
    assert after[0] - before[0] == after[1] - before[1] > 0


def in_engine(server: Running, work: Callable[[Engine], object]) -> object:
    return server.service.model.driver.call(work)


def test_reservations_that_are_exchanged_in_one_file(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
