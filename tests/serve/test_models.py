"""Models that are listed, fetched, chosen and deleted while the server answers."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from contract.errors import DoesNotFit
from harness import catalog
from harness.serve import pulls
from harness.serve.keys import new_key
from harness.serve.model import ServedModel
from harness.serve.run import Running
from tests.harness.hub_server import Hub, send_file, serving_hub
from tests.held_steps import hold_steps
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http, Reply, bearer, posted
from tests.serve.streams import data_of, lines_of
from tests.serve.tenants import write_tenants
from tests.serve.test_connections import heard_until

NAME = "hf.co/org/Tiny-GGUF:Q8_0"
FILE = "Tiny-Q8_0.gguf"
OTHER = "hf.co/org/Other-GGUF:Q8_0"
BODY = {"prompt": "abc", "max_tokens": 8, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def content(synthetic_model) -> bytes:
    """A model that is not the one the server begins with."""
    path: Path = synthetic_model(architecture="llama", quant="q8_0")  # type: ignore[operator]
    return path.read_bytes()


@pytest.fixture
def hub(content, monkeypatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        server.files["org/Tiny-GGUF"] = {FILE: content}
        server.files["org/Other-GGUF"] = {"Other-Q8_0.gguf": b"GGUF, and then nothing"}
        yield server


@pytest.fixture
def server(serve, hub, tmp_path) -> Iterator[Running]:
    with serve(cache_dir=tmp_path) as server:
        yield server


def managed(http: Http) -> dict[str, dict[str, object]]:
    return {facts["id"]: facts for facts in http.get("/v1/models").json["x_zinc"]["managed"]}


def pull(http: Http, name: str = NAME) -> Reply:
    return http.post("/v1/models/pull", {"model": name})


def activate(http: Http, name: str) -> Reply:
    return http.post("/v1/models/activate", {"model": name})


def test_pulled_chosen_asked_and_deleted(server, http, content):
    """The whole way, as OpenAI's client sees it too."""
    lines = lines_of(pull(http).body)
    assert lines[-1] == b"data: [DONE]"
    states = data_of(lines)
    assert {state["model"] for state in states} == {NAME}
    assert [state["status"] for state in states][-1] == "done"
    assert states[-1]["completed"] == states[-1]["total"] == len(content)
    assert managed(http)[NAME]["installed"]
    assert managed(http)["tiny"]["active"]

    before = http.post("/v1/completions", BODY).json
    chosen = activate(http, NAME).json
    assert chosen["id"] == NAME
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME
        answer = client.completions.create(model=NAME, prompt="abc", max_tokens=8, seed=3)
        assert answer.system_fingerprint == chosen["x_zinc"]["fingerprint"]
        assert answer.system_fingerprint != before["system_fingerprint"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="tiny", prompt="abc", max_tokens=8)
        assert http.get("/version").json["fingerprint"] == answer.system_fingerprint
        assert http.send("DELETE", f"/v1/models/{NAME}", None, {}).error["code"] == "model_in_use"

        assert activate(http, "tiny").json["id"] == "tiny"
        assert http.post("/v1/completions", BODY).json["choices"] == before["choices"]
        wait_for_one_model(server)
        assert client.models.delete(NAME).deleted
    assert NAME not in managed(http)
    assert http.get(f"/v1/models/{NAME}").status == 404


def wait_for_one_model(server: Running) -> None:
    wait_until(lambda: len(server.models.paths) == 1)


def test_what_the_old_model_began_it_ends(server, http, monkeypatch):
    """Streamed and whole answers under way while the other model takes over are what they would
    have been; then the old one is gone."""
    pull(http)
    long = {**BODY, "max_tokens": 200}
    alone = http.post("/v1/completions", long).json["choices"][0]["text"]
    steps = hold_steps(monkeypatch)
    replies: list[Reply] = []

    def ask(stream: bool) -> None:
        replies.append(http.post("/v1/completions", {**long, "stream": stream}))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    # Both wait before the first step: one alone might use up the steps that admit the other.
    wait_until(lambda: http.get("/health").json["queued"] == 2)
    steps.allow(5)
    wait_until(lambda: http.get("/health").json["active"] == 2)
    activate(http, NAME)
    steps.allow()
    for thread in threads:
        thread.join()
    texts = []
    for reply in replies:
        if reply.headers["Content-Type"].startswith("text/event-stream"):
            chunks = data_of(lines_of(reply.body))
            texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
        else:
            texts.append(reply.json["choices"][0]["text"])
    assert texts == [alone, alone]
    wait_for_one_model(server)
    assert server.service.model.name == NAME


def test_a_model_that_cannot_be_loaded_changes_nothing(server, http):
    pull(http, OTHER)
    refused = activate(http, OTHER)
    assert (refused.status, refused.error["code"]) == (422, "model_unusable")
    assert http.get("/v1/models").json["data"][0]["id"] == "tiny"
    assert http.post("/v1/completions", BODY).status == 200


def test_what_was_activated_answers_after_a_restart(serve, hub, tmp_path, caplog):
    """Of servers that are started with the same model and ledger, as long as it can; the model they
    are started with comes back by being activated."""
    kept: dict[str, object] = {"cache_dir": tmp_path / "cache", "ledger": tmp_path / "l.sqlite"}
    with serve(**kept) as server:
        pull(Http(server.url))
        activate(Http(server.url), NAME)
        told = Http(server.url).post("/v1/completions", BODY).json["choices"]
    with serve(**kept) as server:
        http = Http(server.url)
        assert http.get("/ready").json["model"] == NAME
        assert http.post("/v1/completions", BODY).json["choices"] == told
        active = {name: facts["active"] for name, facts in managed(http).items()}
        assert (active[NAME], active["tiny"]) == (True, False)
        installed = server.models.paths[0]
    with serve(cache_dir=tmp_path / "cache", ledger=tmp_path / "another.sqlite") as server:
        assert server.service.model.name == "tiny"
    content = installed.read_bytes()
    for damage, problem in (
        (lambda: installed.write_bytes(content[:100]), "cannot answer now"),
        (installed.unlink, "not installed"),
    ):
        damage()
        caplog.clear()
        with serve(**kept) as server:
            assert server.service.model.name == "tiny"
            assert NAME in caplog.text
            assert problem in caplog.text
    installed.write_bytes(content)
    with serve(**kept) as server:
        assert activate(Http(server.url), "tiny").json["id"] == "tiny"
    caplog.clear()
    with serve(**kept) as server:
        assert server.service.model.name == "tiny"
    assert "activated" not in caplog.text


def test_what_the_server_is_started_with_is_not_deleted(serve, hub, content, tmp_path):
    """Also while another model answers: a restart would fetch it again."""
    second = "hf.co/org/Second-GGUF:Q8_0"
    hub.files["org/Second-GGUF"] = {"Second-Q8_0.gguf": content}
    cache = tmp_path / "cache"
    with serve(cache_dir=cache) as server:
        pull(Http(server.url))
    found = catalog.find_pulled(NAME, cache)
    assert found is not None
    with serve(path=found.path, cache_dir=cache) as server:
        http = Http(server.url)
        pull(http, second)
        assert activate(http, second).status == 200
        wait_for_one_model(server)
        kept = http.send("DELETE", f"/v1/models/{NAME}", None, {})
        assert (kept.status, kept.error["code"]) == (400, "model_in_use")
        assert "started with" in kept.error["message"]
        assert found.path.exists()
        assert http.send("DELETE", f"/v1/models/{second}", None, {}).status == 400
        assert activate(http, "tiny").status == 200
        wait_for_one_model(server)
        removed = http.post("/v1/models/remove", {"model": second}).json
        assert (removed["id"], removed["deleted"]) == (second, True)
        assert removed["x_zinc"]["freed_bytes"] > 0
    with serve(cache_dir=cache, beside={"small": found.path}) as server:
        kept = Http(server.url).send("DELETE", f"/v1/models/{NAME}", None, {})
        assert (kept.status, kept.error["code"]) == (400, "model_in_use")
        assert found.path.exists()


def test_one_model_is_loaded_at_a_time_and_only_where_it_fits(server, http, monkeypatch):
    pull(http)
    entered, go_on = threading.Event(), threading.Event()

    def crowded(path: Path, name: str, owned: object, taken: int) -> ServedModel:
        entered.set()
        go_on.wait(PATIENCE_SECONDS)
        raise DoesNotFit(name, 2, 1, "close something")

    monkeypatch.setattr(server.models, "_open", crowded)
    replies: list[Reply] = []
    waiting = threading.Thread(target=lambda: replies.append(activate(http, NAME)))
    waiting.start()
    assert entered.wait(PATIENCE_SECONDS)
    other = activate(http, NAME)
    assert (other.status, other.error["code"]) == (503, "model_loading")
    assert other.headers["Retry-After"]
    kept = http.send("DELETE", f"/v1/models/{NAME}", None, {})
    assert (kept.status, kept.error["code"]) == (503, "model_loading")
    assert http.post("/v1/completions", BODY).status == 200
    go_on.set()
    waiting.join()
    assert (replies[0].status, replies[0].error["code"]) == (422, "model_does_not_fit")
    assert http.post("/v1/completions", {**BODY, "model": "tiny"}).status == 200
    assert len(server.models.paths) == 1


def test_names_that_are_none(server, http, tmp_path):
    """No name is a path, and none leads out of the cache."""
    for name in (
        "../../etc/passwd", "/etc/passwd", "nonsense", "hf.co/../..", "hf.co/org/../Tiny-GGUF",
        "hf.co/org/Tiny-GGUF/../../x.gguf", "https://evil.test/x.gguf", "file:///etc/passwd",
        "hf.co/org/Tiny-GGUF:..%2f", "", "a\0b", "hf.co/org",
    ):  # fmt: skip
        assert pull(http, name).status == 404, name
        assert activate(http, name).status == 404, name
        assert http.post("/v1/models/remove", {"model": name}).status == 404, name
    for path in ("..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "hf.co/org/..%2f..", "x%00y"):
        assert http.send("DELETE", f"/v1/models/{path}", None, {}).status == 404, path
        assert http.get(f"/v1/models/{path}").status == 404, path
    assert activate(http, NAME).error["code"] == "model_not_installed"
    assert http.send("DELETE", f"/v1/models/{NAME}", None, {}).error["code"] == (
        "model_not_installed"
    )
    assert not (tmp_path / "models").exists()


def test_a_pull_that_fails_says_why(server, http, hub):
    """In the stream, and as an answer; nothing of it is visible."""
    hub.digests[FILE] = "0" * 64
    last = data_of(lines_of(pull(http).body))[-1]
    assert last["error"]["code"] == "pull_failed"
    assert "discarded" in last["error"]["message"]
    refused = http.post("/v1/models/pull", {"model": NAME, "stream": False})
    assert (refused.status, refused.error["code"]) == (502, "pull_failed")
    assert refused.headers["x-should-retry"] == "false"
    assert NAME not in managed(http)
    del hub.digests[FILE]
    done = http.post("/v1/models/pull", {"model": NAME, "stream": False}).json
    assert done["status"] == "done"


def test_a_pull_under_way_is_joined_bounded_and_given_up(server, http, hub, content, monkeypatch):
    """Who leaves does not end it; deleting the model does, and it can be pulled again."""
    monkeypatch.setattr(pulls, "MAX_PULLS", 1)
    asked, held, given_up = threading.Event(), threading.Event(), threading.Event()
    give_up = pulls.Pull.give_up

    def slow(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        held.wait(PATIENCE_SECONDS)
        send_file(handler, content)

    def noted(self: pulls.Pull) -> None:
        give_up(self)
        given_up.set()

    monkeypatch.setattr(pulls.Pull, "give_up", noted)
    hub.body[FILE] = slow
    with http.connected() as first:
        first.sendall(posted("/v1/models/pull", {"model": NAME}))
        assert asked.wait(PATIENCE_SECONDS)
    assert pull(http, OTHER).error["code"] == "too_many_pulls"
    assert managed(http)[NAME]["pull"] is not None
    assert not managed(http)[NAME]["installed"]
    replies: list[Reply] = []
    deleting = threading.Thread(
        target=lambda: replies.append(http.send("DELETE", f"/v1/models/{NAME}", None, {}))
    )
    with http.connected() as joined:
        joined.sendall(posted("/v1/models/pull", {"model": NAME}))
        heard_until(joined, b'"status":"downloading"')
        deleting.start()
        assert given_up.wait(PATIENCE_SECONDS)
        held.set()
        heard_until(joined, b"given_up")
    deleting.join()
    assert replies[0].json["deleted"]
    assert hub.gets(FILE) == [None]
    assert NAME not in managed(http)
    del hub.body[FILE]
    assert lines_of(pull(http).body)[-1] == b"data: [DONE]"


def test_only_admins_change_models(serve, hub, tmp_path):
    keys = {name: new_key() for name in ("user", "operator", "admin")}
    rights = {"operator": {"operator": True}, "admin": {"admin": True}}
    path = write_tenants(tmp_path, keys, **rights)
    with serve(tenants=path, cache_dir=tmp_path / "cache") as server:
        http = Http(server.url)
        for name, status in (("user", 403), ("operator", 403), ("admin", 404)):
            who = bearer(keys[name])
            for way in ("pull", "activate", "remove"):
                asked = http.post(f"/v1/models/{way}", {"model": "nonsense"}, **who)
                assert asked.status == status, (name, way)
            assert http.send("DELETE", "/v1/models/nonsense", None, who).status == status
        assert http.get("/metrics", **bearer(keys["admin"])).status == 200
