"""Stored answers of ``/v1/responses``: continued, read, deleted, and bounded."""

import sqlite3
from dataclasses import replace
from typing import Any

import openai
import pytest

from contract.errors import ConfigError
from contract.types import Tenant
from harness.serve.errors import ApiError
from harness.serve.keys import key_digest
from harness.serve.responses.store import FILE, ResponseStore, StoredResponse
from harness.serve.responses.wire import InputItem
from harness.serve.storage import StorageProblem
from tests.serve.http import Http

ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "extra_body": {"seed": 4}}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_is_continued(client, streamed):
    """As if the client had sent all of it; instructions are those of the latest request."""

    def ask(**fields: Any) -> Any:
        if not streamed:
            return client.responses.create(**ASKED, **fields)
        *_, last = client.responses.create(**ASKED, **fields, stream=True)
        return last.response

    first = ask(input="Why is the sky blue?", instructions="be brief")
    assert first.store is True
    second = ask(input="And at night?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = ask(input="Why?", previous_response_id=second.id, store=False)
    items: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
    items += [item.to_dict() for item in first.output]
    items += [{"role": "user", "content": "And at night?"}]
    whole = ask(input=items, store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert third.usage.input_tokens > second.usage.total_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_what_is_stored_is_read_and_deleted(client):
    first = client.responses.create(input="Why?", **ASKED)
    second = client.responses.create(input="How?", previous_response_id=first.id, **ASKED)
    read = client.responses.retrieve(second.id)
    assert read.to_dict() == second.to_dict()
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    texts = [part["text"] for item in items for part in item.to_dict()["content"]]
    assert texts == ["Why?", first.output_text, "How?"]
    assert all("token_ids" not in item.to_dict() for item in items)
    latest = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in latest.data] == [items[2].id, items[1].id]
    assert latest.has_more
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(second.id)
    client.responses.delete(first.id)
    for missing in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(first.id),
        lambda: client.responses.cancel(first.id),
        lambda: client.responses.create(input="a", previous_response_id=second.id, **ASKED),
    ):
        with pytest.raises(openai.NotFoundError):
            missing()


def test_refusals_name_what_is_wrong(http):
    body = {"input": "a", "max_output_tokens": 2}
    unknown = http.post("/v1/responses", body | {"previous_response_id": "resp_1"})
    assert (unknown.status, unknown.error["param"], unknown.error["code"]) == (
        404, "previous_response_id", "previous_response_not_found",
    )  # fmt: skip
    stored = http.post("/v1/responses", body).json["id"]
    long = ("limit=000000001" + "0" * 5000, "limit=0000000019999")
    for query in ("limit=0", "limit=101", "limit=x", *long, "order=up", "after=nothing"):
        refused = http.get(f"/v1/responses/{stored}/input_items?{query}")
        assert refused.status == 400
        assert refused.error["param"] == query.partition("=")[0]
    assert http.get(f"/v1/responses/{stored}?stream=true").status == 400
    assert http.get(f"/responses/{stored}").json["id"] == stored


def test_the_tokens_of_a_conversation_are_counted(client, http):
    first = client.responses.create(input="Why is that?", **ASKED)
    body = {"input": "And?", "previous_response_id": first.id, "max_output_tokens": 1}
    counted = http.post("/v1/responses/input_tokens", body).json
    assert counted["object"] == "response.input_tokens"
    answered = http.post("/v1/responses", body).json
    assert counted["input_tokens"] == answered["usage"]["input_tokens"]


def test_a_stored_answer_is_continued_with_its_tokens(hermes):
    """What the model generated is in the cache, however the text would be divided."""
    http = Http(hermes.url)
    schema = {"type": "string", "pattern": "^[a-z]{80}$"}
    body: dict[str, Any] = {
        "input": "Say something long. " * 8,
        "max_output_tokens": 150,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
    }
    answers = (http.post("/v1/responses", body | {"seed": seed}).json for seed in range(50))
    first = next(one for one in answers if one["status"] == "completed" and len(one["output"]) == 1)
    more = {"input": "More.", "seed": 5, "max_output_tokens": 1}
    second = http.post("/v1/responses", more | {"previous_response_id": first["id"]}).json
    generated = first["usage"]["total_tokens"]
    assert second["x_zinc"]["cached"]["tokens"] >= generated - 17
    assert "first_difference" not in second["x_zinc"]["cached"]


def test_another_tenants_answer_is_not_there(serve, tmp_path):
    """404, like one that never was; and gone with its tenant, whoever has its id then."""
    file = tmp_path / "tenants.toml"

    def write(names: dict[str, int]) -> None:
        file.write_text(
            "".join(
                f"[tenant.{name}]\nid = {id}\nisolation_group = 1\n"
                f'keys = ["{key_digest(name * 9)}"]\n'
                for name, id in names.items()
            )
        )

    write({"alice": 1, "bob": 2})
    with serve(tenants=file) as server:
        http = Http(server.url)

        def key(name: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {name * 9}"}

        body = {"input": "a secret", "max_output_tokens": 2}
        id = http.post("/v1/responses", body, **key("alice")).json["id"]
        never = http.get("/v1/responses/resp_never", **key("bob"))
        for method, path in (
            ("GET", f"/v1/responses/{id}"),
            ("GET", f"/v1/responses/{id}/input_items"),
            ("DELETE", f"/v1/responses/{id}"),
            ("POST", f"/v1/responses/{id}/cancel"),
        ):
            refused = http.send(method, path, None, key("bob"))
            assert refused.status == 404, path
            assert refused.error["code"] == never.error["code"]
        continued = http.post("/v1/responses", body | {"previous_response_id": id}, **key("bob"))
        assert continued.status == 404
        listed = http.get(f"/v1/responses/{id}/input_items", **key("alice")).json
        item = {"input": [{"type": "item_reference", "id": listed["first_id"]}]}
        for name, status in (("alice", 200), ("bob", 404)):
            assert http.post("/v1/responses", body | item, **key(name)).status == status
        assert http.get(f"/v1/responses/{id}", **key("alice")).status == 200
        accounts, tell = server.models.accounts, server.models.change_tenants
        for names in ({"bob": 2}, {"carol": 1, "bob": 2}):
            write(names)
            accounts.reload(tell)
        assert http.get(f"/v1/responses/{id}", **key("carol")).status == 404


A, B = Tenant(1, "alice"), Tenant(2, "bob")


def stored(number: int, size: int = 1, previous: str | None = None) -> StoredResponse:
    response = {"id": f"resp_{number}", "output": ["x" * size]}
    return StoredResponse(response, (InputItem(role="user", content=str(number)),), (), previous)


def test_items_are_those_of_the_latest_answer_that_has_them(tmp_path):
    """What cannot be read is passed over; an answer that is referred to is used."""
    with ResponseStore(tmp_path, max_responses=3) as store:
        for number, text in enumerate(["old", "new"]):
            item = InputItem(role="user", id="a", content=text)
            own = InputItem(role="assistant", id=f"own_{number}", content=text)
            store.put(A, replace(stored(number), items=(item,), said=(own,)))
        store._file.execute("INSERT INTO responses VALUES ('1 alice', 'x', 9, 1, x'00')")
        found = store.items(A, {"a", "own_0", "nothing"})
        assert {id: item.content for id, item in found.items()} == {"a": "new", "own_0": "old"}
        assert store.items(B, {"a"}) == {}
        for number in (2, 3):
            store.items(A, {"own_0"})
            store.put(A, stored(number))
        assert store.items(A, {"own_0", "own_1"}).keys() == {"own_0"}
        store.forget_others([B])
        assert store.items(A, {"own_0"}) == {}


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_store_is_bounded_for_each_tenant(on_disk, tmp_path):
    """By number and by bytes, least recently used first; others' room is their own."""
    store = ResponseStore(tmp_path if on_disk else None, max_responses=3, max_bytes=10_000)
    store.put(B, stored(0))
    for number in range(3):
        store.put(A, stored(number, previous=f"resp_{number - 1}" if number else None))
    assert [item.content for item in store.conversation(A, "resp_2")] == ["0", "1", "2"]
    store.get(A, "resp_0")
    store.put(A, stored(3))
    store.get(A, "resp_0")
    with pytest.raises(ApiError):
        store.get(A, "resp_1")
    with pytest.raises(ApiError) as lost:
        store.conversation(A, "resp_2")
    assert lost.value.status == 404
    store.put(A, stored(4, 9_000))
    store.put(A, stored(5, 9_000))
    with pytest.raises(ApiError):
        store.get(A, "resp_4")
    store.put(A, stored(6, 20_000))
    with pytest.raises(ApiError):
        store.get(A, "resp_6")
    assert store.get(A, "resp_5").response["id"] == "resp_5"
    assert store.get(B, "resp_0").response["id"] == "resp_0"
    store.forget_others([A])
    with pytest.raises(ApiError):
        store.get(B, "resp_0")


def test_answers_outlive_a_server(serve, tmp_path):
    """In a folder; a deleted one does not, and neither does any with memory alone."""
    body = {"input": "Why is the sky blue?", "max_output_tokens": 8, "seed": 4}
    for state in (tmp_path / "state", None):
        with serve(state=state) as server:
            http = Http(server.url)
            first = http.post("/v1/responses", body).json
            deleted = http.post("/v1/responses", body).json["id"]
            assert http.send("DELETE", f"/v1/responses/{deleted}", None, {}).status == 200
            more = {**body, "input": "More.", "store": False, "previous_response_id": first["id"]}
            before = http.post("/v1/responses", more).json
        with serve(state=state) as server:
            http = Http(server.url)
            after = http.post("/v1/responses", more)
            assert http.get(f"/v1/responses/{deleted}").status == 404
            if state is None:
                assert after.status == 404
                continue
            assert http.get(f"/v1/responses/{first['id']}").json == first
            assert after.json["output"][0]["content"] == before["output"][0]["content"]
            assert after.json["usage"]["input_tokens"] == before["usage"]["input_tokens"]
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o077 == 0


def test_whoever_has_an_id_after_a_restart_finds_no_answer_of_another(tmp_path):
    """Nor does a tenant who was away meanwhile."""
    with ResponseStore(tmp_path) as store:
        for tenant in (A, B):
            store.put(tenant, stored(1))
    with ResponseStore(tmp_path) as store, pytest.raises(ApiError):
        store.get(Tenant(A.id, "carol"), "resp_1")
    with ResponseStore(tmp_path) as store:
        store.forget_others([B])
    with ResponseStore(tmp_path) as store:
        store.get(B, "resp_1")
        with pytest.raises(ApiError):
            store.get(A, "resp_1")


def test_a_folder_that_cannot_have_answers_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="--state"):
        ResponseStore(tmp_path)
    with pytest.raises(ConfigError, match="--state"):
        ResponseStore(tmp_path / FILE)


def test_a_database_that_another_process_holds_is_read_and_forgets_later(tmp_path, monkeypatch):
    """A tenant that left while nothing could be written has no answers when it is back; a request
    that continues nothing waits for no lock."""
    monkeypatch.setattr("harness.serve.storage.BUSY_SECONDS", 0.01)
    with ResponseStore(tmp_path) as store:
        for tenant in (A, B):
            store.put(tenant, stored(1))
        said: list[str] = []
        store._file.set_trace_callback(said.append)
        assert store.conversation(A, None) == []
        assert not said
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        store.forget_others([B])
        store.forget_others([A, B])
        assert store.get(B, "resp_1") == stored(1)
        with pytest.raises(ApiError):
            store.get(A, "resp_1")
        with pytest.raises(StorageProblem):
            store.put(A, stored(2))
        other.execute("ROLLBACK")
        store.put(A, stored(2))
        assert store.get(A, "resp_2") == stored(2)
        rows = other.execute("SELECT tenant, id FROM responses ORDER BY tenant").fetchall()
        assert rows == [("1 alice", "resp_2"), ("2 bob", "resp_1")]
        other.close()


@pytest.mark.parametrize("how", ["deleted", "forgotten", "evicted"])
def test_no_byte_of_what_is_deleted_stays(how, tmp_path):
    """Neither in the file nor in the log of changes, while another process has the file open; what
    makes room for others stays in the log until it is written over, at the latest to the end."""

    def found() -> bool:
        return any(b"x" * 100 in file.read_bytes() for file in tmp_path.glob(f"{FILE}*"))

    with ResponseStore(tmp_path) as other, ResponseStore(tmp_path, max_responses=1) as store:
        store.put(B, stored(1))
        store.put(A, stored(2, 9000))
        assert found()
        if how == "deleted":
            store.delete(A, "resp_2")
        elif how == "forgotten":
            store.forget_others([B])
        else:
            store.put(A, stored(3))
        assert found() == (how == "evicted")
        with pytest.raises(ApiError):
            other.get(A, "resp_2")
    assert not found()


@pytest.mark.parametrize("data", [None, "{}", b"\xff", b'{"response": 1}', "resp_1"])
def test_a_row_that_is_no_answer_is_not_there(data, tmp_path):
    """Nor is one that continues itself."""
    with ResponseStore(tmp_path) as store:
        store.put(A, stored(1, previous="resp_1"))
        if data != "resp_1":
            store._file.execute("UPDATE responses SET stored = ?", (data,))
            with pytest.raises(ApiError):
                store.get(A, "resp_1")
        with pytest.raises(ApiError) as lost:
            store.conversation(A, "resp_1")
        assert lost.value.status == 404
