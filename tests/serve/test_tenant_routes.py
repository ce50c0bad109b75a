"""Tenants changed over HTTP: in force at once, by admins alone; what was under way ends."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.serve.keys import key_digest, new_key
from harness.serve.run import Running
from tests.serve.engine_child import tenant_of
from tests.serve.http import Http, Reply, bearer, posted
from tests.serve.streams import data_of, lines_of

ADMIN, OPERATOR, ALICE = new_key(), new_key(), new_key()
BODY = {"prompt": "abc", "max_tokens": 3}


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(
        "# who may ask\n"
        f'[tenant.root]\nid = 1\nadmin = true\nkeys = ["{key_digest(ADMIN)}"]\n'
        f'[tenant.ops]\nid = 2\noperator = true\nkeys = ["{key_digest(OPERATOR)}"]\n'
        f'[tenant.alice]\nid = 3\nkeys = ["{key_digest(ALICE)}"]\n'
    )
    return path


@pytest.fixture
def keyed(serve, path) -> Iterator[Running]:
    with serve(tenants=path) as server:
        yield server


@pytest.fixture
def http(keyed) -> Http:
    return Http(keyed.url)


def add(http: Http, key: str = ADMIN, **values: object) -> Reply:
    return http.post("/v1/tenants", values, **bearer(key))


def test_a_tenant_from_beginning_to_end(http, path):
    """Every step is in force when it is answered, and a key is shown once."""
    added = add(http, name="bob", qos="batch", max_slots=1)
    key, facts = added.json["key"], added.json["tenant"]
    assert added.headers["Cache-Control"] == "no-store"
    assert (facts["id"], facts["name"], facts["qos"], facts["keys"]) == (4, "bob", "batch", 1)
    assert http.post("/v1/completions", BODY, **bearer(key)).status == 200
    assert http.get("/v1/tenants/bob/usage", **bearer(key)).json["total"]["completed"] == 1
    assert http.get("/v1/tenants/bob", **bearer(key)).json == facts

    fresh = http.post("/v1/tenants/bob/rotate", {}, **bearer(ADMIN)).json["key"]
    assert http.post("/v1/completions", BODY, **bearer(key)).status == 401
    assert http.post("/v1/completions", BODY, **bearer(fresh)).status == 200
    both = http.post("/v1/tenants/4/rotate", {"keep_old": True}, **bearer(ADMIN)).json
    assert both["tenant"]["keys"] == 2
    assert http.post("/v1/completions", BODY, **bearer(fresh)).status == 200

    listed = http.get("/v1/tenants", **bearer(OPERATOR))
    assert [each["name"] for each in listed.json["data"]] == ["root", "ops", "alice", "bob"]
    for secret in (key, fresh, both["key"], "sha256:"):
        assert secret.encode() not in listed.body
    assert key not in path.read_text()
    assert path.read_text().startswith("# who may ask\n")

    removed = http.send("DELETE", "/v1/tenants/bob", None, bearer(ADMIN)).json
    assert removed == {"id": 4, "name": "bob", "deleted": True}
    assert http.post("/v1/completions", BODY, **bearer(both["key"])).status == 401
    again = add(http, name="bob").json["tenant"]
    assert again["id"] == 5, "the usage of who was removed is nobody else's"


def test_who_is_removed_ends_what_it_began(keyed, http):
    """Its stream goes on to the end, and then the engine knows it no more."""
    driver = keyed.service.model.driver
    long = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True, "seed": 1}
    alone = data_of(lines_of(http.post("/v1/completions", long, **bearer(ALICE)).body))
    request = posted("/v1/completions", long).replace(
        b"Host: localhost\r\n", f"Host: localhost\r\nAuthorization: Bearer {ALICE}\r\n".encode()
    )
    with http.connected() as connection:
        connection.sendall(request)
        heard = connection.recv(65536)
        while b"data: " not in heard:
            heard += connection.recv(65536)
        http.send("DELETE", "/v1/tenants/alice", None, bearer(ADMIN))
        assert http.get("/v1/models", **bearer(ALICE)).status == 401
        while b"[DONE]" not in heard:
            heard += connection.recv(65536)
    told = data_of([line for line in heard.split(b"\n") if line.startswith(b"data: ")])
    assert text_of(told) == text_of(alone)
    assert driver.call(tenant_of, 3) is None


def text_of(chunks: list[dict[str, object]]) -> str:
    return "".join(json.loads(json.dumps(chunk))["choices"][0]["text"] for chunk in chunks)


def test_only_admins_change_and_only_operators_see_all(http):
    for key in (OPERATOR, ALICE):
        assert add(http, key, name="bob").error["code"] == "admin_only"
        assert http.post("/v1/tenants/alice/rotate", {}, **bearer(key)).status == 403
        assert http.send("DELETE", "/v1/tenants/alice", None, bearer(key)).status == 403
    assert http.get("/v1/tenants", **bearer(ALICE)).status == 403
    for name in ("root", "1", "nobody", "99", "%2e%2e"):
        assert http.get(f"/v1/tenants/{name}", **bearer(ALICE)).status == 404
    assert http.get("/v1/tenants/alice", **bearer(ALICE)).json["id"] == 3
    assert http.get("/v1/tenants/alice", **bearer(OPERATOR)).json["id"] == 3


CANNOT_BE: list[tuple[dict[str, object], str]] = [
    ({"name": "alice"}, "already"),
    ({"name": "bob", "id": 1}, "id 1 is that of 'root'"),
    ({"name": "../../x"}, "cannot be a tenant's name"),
    ({"name": "7"}, "cannot be a tenant's name"),
    ({"name": "bob", "max_slots": 0}, ">= 1"),
    ({"name": "bob", "reserved_pages": 4000}, "4000 pages would be reserved"),
    ({"name": "bob", "weight": 0}, "> 0"),
    ({"name": "bob", "keys": []}, "unknown field `keys`"),
    ({}, "name is missing"),
]


def test_a_tenant_that_cannot_be_is_refused(http, path):
    """With the reason, without the file's place, which is as it was. Nobody locks all out."""
    before = path.read_text()
    for values, problem in CANNOT_BE:
        refused = add(http, **values)
        assert (refused.status, problem in refused.error["message"]) == (400, True), values
        assert str(path.parent) not in refused.error["message"]
    assert path.read_text() == before
    refused = http.send("DELETE", "/v1/tenants/root", None, bearer(ADMIN))
    assert "cannot remove itself" in refused.error["message"]
    missing = http.send("DELETE", "/v1/tenants/nobody", None, bearer(ADMIN))
    assert missing.status == 404


def test_a_server_without_keys_has_no_tenants_to_change(server):
    http = Http(server.url)
    assert add(http, name="bob").error["code"] == "no_tenants_file"
    assert [each["name"] for each in http.get("/v1/tenants").json["data"]] == ["local"]
