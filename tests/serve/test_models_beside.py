"""Several models of one server: named by requests, loaded on demand, unloaded for others."""

import errno
import gc
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from contract.errors import ConfigError, DoesNotFit
from harness.host import heap
from harness.serve.keys import new_key
from harness.serve.model import ServedModel
from harness.serve.run import Running
from reference.engine.models import Models
from tests.serve.conftest import wait_for_rest
from tests.serve.http import Http, Reply, bearer
from tests.serve.streams import data_of, lines_of
from tests.serve.tenants import write_tenants

BODY = {"prompt": "abc", "max_tokens": 24, "seed": 3, "ignore_eos": True, "temperature": 0.8}
NAMES = ("tiny", "llama", "qwen2")


@pytest.fixture(scope="module")
def background(synthetic_model) -> dict[str, Path]:
    return {name: synthetic_model(architecture=name, quant="q8_0") for name in NAMES[1:]}


@pytest.fixture(scope="module")
def alone(serve, background) -> dict[str, list[object]]:
    """What each model answers on a server of its own."""
    answers = {}
    for name in NAMES:
        with serve(**({"path": background[name]} if name in background else {})) as server:
            answers[name] = Http(server.url).post("/v1/completions", BODY).json["choices"]
    return answers


@pytest.fixture
def server(serve, background) -> Iterator[Running]:
    with serve(beside=background) as server:
        yield server


def ask(http: Http, name: str | None, **more: object) -> Reply:
    named = {} if name is None else {"model": name}
    return http.post("/v1/completions", {**BODY, **named, **more})


def loaded(server: Running) -> set[str]:
    here = {name for name, model in server.models.others.items() if model is not None}
    return {server.service.model.name, *here}


def room_for(server: Running, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no more than so many models fit."""
    opened = server.models._open

    def crowded(path: Path, name: str, owned: ExitStack, taken: int) -> ServedModel:
        if len(server.models.paths) >= most:
            raise DoesNotFit(name, most + 1, most, "unload one")
        return opened(path, name, owned, taken)

    monkeypatch.setattr(server.models, "_open", crowded)


def test_each_request_is_answered_by_the_model_it_names(http, alone):
    """All at once, whole and as streams, each as on a server of its own; without a name the one the
    server was started with."""
    replies: dict[tuple[str, bool], Reply] = {}

    def ask_for(name: str, stream: bool) -> None:
        replies[name, stream] = ask(http, name, stream=stream)

    asked = [(name, stream) for name in NAMES for stream in (False, True)]
    threads = [threading.Thread(target=ask_for, args=one) for one in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (name, stream), reply in replies.items():
        if stream:
            chunks = data_of(lines_of(reply.body))
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == alone[name][0]["text"]  # type: ignore[index]
            assert {chunk["model"] for chunk in chunks} == {name}
        else:
            assert (reply.json["model"], reply.json["choices"]) == (name, alone[name])
    assert ask(http, None).json["model"] == "tiny"
    assert ask(http, "gpt").error["code"] == "model_not_found"
    prints = {reply.json["system_fingerprint"] for (_, s), reply in replies.items() if not s}
    assert len(prints) == len(NAMES)


def test_what_may_be_named_is_listed(server, http):
    def listed() -> dict[str, bool]:
        data = http.get("/v1/models").json["data"]
        return {model["id"]: "fingerprint" in model["x_zinc"] for model in data}

    assert listed() == {"tiny": True, "llama": False, "qwen2": False}
    tokens = http.post("/tokenize", {"model": "llama", "prompt": "abc"}).json
    assert tokens["count"] > 0
    assert listed() == {"tiny": True, "llama": True, "qwen2": False}
    assert http.get("/v1/models/qwen2").json["x_zinc"] == {"loaded": False}
    told = http.get("/metrics").body.decode()
    for name in ("tiny", "llama"):
        assert f'zinc_rt:num_requests_running{{model_name="{name}"}}' in told
    assert "qwen2" not in told
    assert server.service.model.name == "tiny"


def test_the_one_unused_for_longest_makes_room_and_comes_back(server, http, alone, monkeypatch):
    """The model the server was started with stays."""
    room_for(server, 2, monkeypatch)
    for name in ("llama", "qwen2", "llama"):
        assert ask(http, name).json["choices"] == alone[name]
        assert loaded(server) == {"tiny", name}
        assert ask(http, None).json["choices"] == alone["tiny"]
        wait_for_rest(server)
    told = http.get("/metrics").body.decode()
    assert 'model_name="llama"' in told
    assert 'model_name="qwen2"' not in told


def test_of_two_the_one_used_last_stays(server, http, monkeypatch):
    ask(http, "llama")
    ask(http, "qwen2")
    ask(http, "llama")
    wait_for_rest(server)
    assert server.models._unload_one()
    assert loaded(server) == {"tiny", "llama"}
    assert server.models._unload_one()
    assert not server.models._unload_one()
    assert ask(http, None).status == 200


def test_one_in_use_makes_no_room(server, http, alone, monkeypatch):
    """Whoever asks for another is told to come again, and what is under way ends as it would."""
    room_for(server, 2, monkeypatch)
    ask(http, "llama")
    lease = server.models.lease("llama")
    refused = ask(http, "qwen2")
    assert (refused.status, refused.error["code"]) == (503, "model_does_not_fit")
    assert refused.headers["Retry-After"]
    assert ask(http, "llama").json["choices"] == alone["llama"]
    lease.release()
    wait_for_rest(server)
    assert ask(http, "qwen2").json["choices"] == alone["qwen2"]


def test_a_model_that_is_damaged_is_refused_and_the_others_answer(serve, background, tmp_path):
    bad = tmp_path / "bad.gguf"
    shutil.copyfile(background["llama"], bad)
    with serve(beside={"bad": bad, "llama": background["llama"]}) as server:
        http = Http(server.url)
        os.truncate(bad, 1000)
        refused = ask(http, "bad")
        assert (refused.status, refused.error["code"]) == (422, "model_unusable")
        assert ask(http, "llama").status == 200
        assert loaded(server) == {"tiny", "llama"}


def test_a_process_that_the_system_refuses_is_no_fault_of_the_model(
    server, http, monkeypatch, caplog
):
    """A limit of processes is reached while it is loaded: a later try may succeed."""

    def refused(script: Path) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr("reference.worker_process.start_process", refused)
        reply = ask(http, "llama")
    assert (reply.status, reply.error["code"]) == (503, "overloaded")
    assert "Resource temporarily unavailable" in caplog.text
    assert ask(http, "llama").status == 200


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_a_file_that_is_no_model_is_named_at_the_start(serve, background, tmp_path, content):
    """Before any model is loaded: not by the first request for it."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(background["llama"].read_bytes()[:-1000] if content is None else content)
    with (
        pytest.raises(ConfigError, match=r"--beside: bad could not be loaded: .*bad\.gguf"),
        serve(beside={**background, "bad": bad}),
    ):
        raise AssertionError("it started")


def test_a_model_whose_file_is_written_to_ends_alone(serve, background, alone, tmp_path):
    """Who waits for it is told; the others answer on, and the next request loads it anew."""
    path = tmp_path / "llama.gguf"
    shutil.copyfile(background["llama"], path)
    with serve(beside={**background, "llama": path}) as server:
        http = Http(server.url)
        for _ in range(2):
            for name in NAMES:
                assert ask(http, name).json["choices"] == alone[name]
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
            ended = ask(http, "llama")
            assert (ended.status, ended.error["code"]) == (503, "engine_stopped")
            assert "file was changed" in ended.error["message"]
            assert http.get("/health").status == 200
        assert ask(http, "llama").json["choices"] == alone["llama"]
        assert loaded(server) == set(NAMES)


def test_where_the_first_model_ended_by_its_file_the_others_are_loaded_and_activated(
    serve, background, tiny_model_path, tmp_path
):
    """Requests for the first one are told what helps."""
    path = tmp_path / "first.gguf"
    shutil.copyfile(tiny_model_path, path)
    with serve(path=path, beside=background) as server:
        http = Http(server.url)
        assert ask(http, None).status == 200
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
        for _ in range(2):
            ended = ask(http, None)
            assert (ended.status, ended.error["code"]) == (503, "engine_stopped")
        assert "restart the server if" in ended.error["message"]
        assert ask(http, "llama").status == 200
        server.models.activate("qwen2", background["qwen2"])
        assert ask(http, None).json["model"] == "qwen2"


def test_one_of_them_may_be_activated(server, http, alone):
    """It then answers who names none; the one before it may still be named."""
    ask(http, "llama")
    models = server.models
    models.activate("llama", models.names.files["llama"])
    assert ask(http, None).json["model"] == "llama"
    assert ask(http, "tiny").json["choices"] == alone["tiny"]
    assert loaded(server) == {"tiny", "llama"}
    assert len(models.paths) == 2


def test_quotas_are_those_of_all_models_together(serve, background, tmp_path):
    """A tenant with one slot has it on one model at a time, and one that is gone is gone from
    all."""
    keys = {"one": new_key(), "other": new_key()}
    path = write_tenants(tmp_path, keys, one={"max_slots": 1}, other={"max_slots": 1})
    with serve(beside=background, tenants=path) as server:
        http = Http(server.url)
        key = bearer(keys["one"])
        together = server.models._thread
        assert together is not None
        most = 0

        def running(models: Models) -> int:
            return sum(models.engine(name).statistics.running for name in models.loaded)

        def ask_long(name: str) -> None:
            body = {**BODY, "model": name, "max_tokens": 60}
            assert http.post("/v1/completions", body, **key).status == 200

        threads = [threading.Thread(target=ask_long, args=(name,)) for name in NAMES for _ in "12"]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, together.call(running))
        assert most == 1
        write_tenants(tmp_path, {"other": keys["other"]}, other={"id": 2, "max_slots": 1})
        server.models.accounts.reload(server.models.change_tenants)
        assert http.post("/v1/completions", BODY, **key).status == 401
        for model in (server.service.model, *filter(None, server.models.others.values())):
            known = model.driver.call(lambda engine: [tenant.id for tenant in engine.tenants])
            assert known == [2]
            assert not model.driver.call(lambda engine: engine.memory.cached)


def test_a_budget_is_that_of_all_together(serve, background, monkeypatch):
    """The bytes of those in memory are taken from it before another is planned."""
    with serve(beside=background) as server:
        opened, taken = server.models._open, []

        def noted(path: Path, name: str, owned: ExitStack, nbytes: int) -> ServedModel:
            taken.append(nbytes)
            return opened(path, name, owned, nbytes)

        monkeypatch.setattr(server.models, "_open", noted)
        plans = [server.service.model.plan.total]
        for name in ("llama", "qwen2"):
            ask(Http(server.url), name)
            assert taken[-1] == sum(plans)
            here = server.models.others[name]
            assert here is not None
            plans.append(here.plan.total)


def test_what_is_unloaded_is_garbage_that_goes(server, http, monkeypatch):
    """In a server's own process the collector does not look at what stays; a model that left is not
    among that, nor what refers to itself beside it."""

    class Ring:
        def __init__(self) -> None:
            self.itself = self

    ask(http, "llama")
    wait_for_rest(server)
    model = weakref.ref(server.models.others["llama"])
    ring = Ring()
    alive = weakref.ref(ring)
    monkeypatch.setattr(heap, "_frozen", False)
    try:
        heap.freeze_heap()
        assert gc.get_freeze_count() > 10_000
        del ring
        assert server.models._unload_one()
        assert model() is None
        assert alive() is None
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


KEYS = {name: new_key() for name in ("two", "none", "all")}


@pytest.fixture
def pinned(serve, background, tmp_path) -> Iterator[Running]:
    """A server of three models with a tenant for two of them, one for none of them and one for
    all."""
    may = {"two": {"models": ["llama", "qwen2"]}, "none": {"models": ["gone"]}}
    path = write_tenants(tmp_path, KEYS, **may)
    with serve(beside=background, tenants=path) as server:
        yield server


def test_a_tenant_sees_and_uses_its_models_alone(pinned):
    """By any route; a model that is not allowed is not loaded."""
    http = Http(pinned.url)
    for tenant, names in (
        ("two", ["llama", "qwen2"]), ("none", []), ("all", ["tiny", "llama", "qwen2"]),
    ):  # fmt: skip
        data = http.get("/v1/models", **bearer(KEYS[tenant])).json["data"]
        assert [model["id"] for model in data] == names
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"):
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "abc"}]}
        reply = http.post(path, body, **bearer(KEYS["two"]))
        assert (reply.status, b"llama, qwen2" in reply.body) == (403, True), path
    for tenant, name, answers in (
        ("two", "tiny", None), ("two", "gpt", None), ("none", None, None), ("none", "tiny", None),
        ("none", "gone", None), ("all", None, "tiny"), ("two", None, "llama"),
        ("two", "llama", "llama"), ("two", "qwen2:latest", "qwen2"), ("all", "qwen2", "qwen2"),
    ):  # fmt: skip
        named = {} if name is None else {"model": name}
        reply = http.post("/v1/completions", {**BODY, **named}, **bearer(KEYS[tenant]))
        if answers is None:
            assert (reply.status, reply.error["code"]) == (403, "model_not_allowed"), name
            assert loaded(pinned) == {"tiny"}, "a model that is not allowed was loaded"
        else:
            assert (reply.status, reply.json["model"]) == (200, answers)
