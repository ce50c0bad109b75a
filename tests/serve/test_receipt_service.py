"""Receipts of a server with tenants, and of one whose disk is full."""

import json
from collections.abc import Iterator

import pytest

from contract.types import LOCAL_TENANT
from harness.serve.receipts.document import Receipt, parse_receipt
from harness.serve.receipts.store import ReceiptStore
from harness.serve.receipts.verify import chain_verdict
from harness.serve.run import Running
from tests.serve.http import Http, bearer
from tests.serve.tenants import write_tenants
from tests.serve.test_full_disk import FullDisk
from tests.serve.test_tenants import ALICE, BOB, OPERATOR, tenants_file

BODY = {"prompt": "abc", "max_tokens": 3}
TEXTS = {"input": ["abc"]}
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def keyed(serve, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tenants")
    with serve(tenants=tenants_file(folder), receipts=folder / "receipts") as server:
        yield server


def fetched(http: Http, key: str) -> list[Receipt]:
    """All receipts of who has a key."""
    names = [one["id"] for one in http.get("/v1/receipts", **bearer(key)).json["data"]]
    documents = [http.get(f"/v1/receipts/{name}", **bearer(key)) for name in names]
    return [parse_receipt(document.body, "receipt") for document in documents]


def test_who_gets_an_id_later_reads_no_receipt_of_before(serve, tmp_path):
    """Nor who it was before that. The chain of the id goes on, for who exports it."""
    path = write_tenants(tmp_path, {"alice": ALICE})
    with serve(tenants=path, receipts=tmp_path / "receipts") as server:
        http, ids = Http(server.url), dict[str, str]()
        for name, key in (("alice", ALICE), ("carol", BOB), ("alice", ALICE)):
            write_tenants(tmp_path, {name: key})
            server.models.accounts.reload(server.models.change_tenants)
            own = [ids[name]] if name in ids else []
            listed = http.get("/v1/receipts", **bearer(key)).json["data"]
            assert [one["id"] for one in listed] == own
            for receipt in ("latest", *ids.values()):
                found = http.get(f"/v1/receipts/{receipt}", **bearer(key))
                expected = own if receipt in ("latest", *own) else []
                assert found.status == (200 if expected else 404)
                assert not expected or found.json["payload"]["id"] == ids[name]
            ids[name] = http.post(COMPLETIONS, BODY, **bearer(key)).json["id"]
        assert http.get("/v1/receipts/latest", **bearer(ALICE)).json["payload"]["number"] == 3


def test_every_tenant_has_a_chain_of_its_own(keyed):
    http = Http(keyed.url)
    for key in (ALICE, BOB, ALICE, ALICE, BOB):
        assert http.post(COMPLETIONS, BODY, **bearer(key)).status == 200
    chains = {key: fetched(http, key) for key in (ALICE, BOB)}
    for key, (name, count) in {ALICE: ("alice", 3), BOB: ("bob", 2)}.items():
        assert [one.payload.number for one in chains[key]] == list(range(1, count + 1))
        assert {one.payload.tenant.name for one in chains[key]} == {name}
        assert chain_verdict(chains[key]) == []
        latest = http.get("/v1/receipts/latest", **bearer(key)).json
        assert latest["payload"]["id"] == chains[key][-1].payload.id
    mixed = [*chains[ALICE][:2], *chains[BOB][1:]]
    said = chain_verdict(mixed)
    assert said[0] == (
        f"different: tenant: receipt 2 ({mixed[2].payload.id}) is 'bob''s, not 'alice''s"
    )
    for key in (BOB, OPERATOR):
        stolen = f"/v1/receipts/{chains[ALICE][0].payload.id}"
        assert http.get(stolen, **bearer(key)).status == 404
    assert http.get("/v1/receipts").status == 401
    assert http.get("/v1/receipts/latest", **bearer(OPERATOR)).status == 404


def test_a_receipt_that_cannot_be_stored_fails_its_answer(serve, tmp_path, monkeypatch):
    """Whole answers, streams and vectors that had begun when the disk filled; then all goes on, and
    the chain has no gap."""
    monkeypatch.setattr(ReceiptStore, "check", lambda store: None)
    with serve(receipts=tmp_path / "receipts") as server:
        http = Http(server.url)
        assert http.post(COMPLETIONS, BODY).status == 200
        store = server.service.receipts
        assert store is not None
        disk = store._file = FullDisk(store._file)  # type: ignore[assignment]
        disk.full = True
        for path, body in ((COMPLETIONS, BODY), (EMBEDDINGS, TEXTS)):
            refused = http.post(path, body)
            assert (refused.status, refused.error["code"]) == (503, "disk_full")
            assert "receipt" in refused.error["message"]
        lines = http.post(COMPLETIONS, {**BODY, "stream": True}).body.split(b"\n\n")
        assert "receipt" in json.loads(lines[-2].removeprefix(b"data: "))["error"]["message"]
        assert b"[DONE]" not in lines[-2]
        assert disk.refused == 3
        assert http.post(COMPLETIONS, {**BODY, "receipt": False}).status == 200
        disk.full = False
        assert http.post(COMPLETIONS, BODY).status == 200
        names = [one["id"] for one in http.get("/v1/receipts").json["data"]]
        chain = [parse_receipt(http.get(f"/v1/receipts/{name}").body, "r") for name in names]
        assert [one.payload.number for one in chain] == [1, 2]
        assert chain_verdict(chain) == []
        counts = server.service.ledger.total(LOCAL_TENANT)
        assert (counts.requests, counts.completed, counts.failed) == (6, 3, 3)
