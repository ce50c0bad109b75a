"""Lists of models while models come and go."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.serve.run import Running
from harness.serve.server_models import ServerModels
from tests.serve.conftest import wait_for_rest
from tests.serve.http import Http, Reply

NAMES = ("llama", "qwen2")
BODY = {"prompt": "abc", "max_tokens": 8, "seed": 3, "ignore_eos": True}
LISTS = ("/v1/models", "/api/tags", "/api/ps", "/metrics", "/health")


@pytest.fixture(scope="module")
def background(synthetic_model) -> dict[str, Path]:
    return {name: synthetic_model(architecture=name, quant="q8_0") for name in NAMES}


@pytest.fixture
def server(serve, background) -> Iterator[Running]:
    with serve(beside=background) as server:
        yield server


def ask(http: Http, name: str) -> Reply:
    return http.post("/v1/completions", {**BODY, "model": name})


def test_a_model_whose_file_is_gone_breaks_no_list(serve, background, tmp_path):
    """It answers on where it is in memory, and is listed; else it is no model that answers."""
    path = tmp_path / "llama.gguf"
    shutil.copyfile(background["llama"], path)
    with serve(beside={**background, "llama": path}) as server:
        http = Http(server.url)
        told = ask(http, "llama").answer["choices"]
        path.unlink()
        lists = [http.get(route) for route in LISTS]
        assert [reply.status for reply in lists] == [200] * len(LISTS)
        assert [b"llama" in reply.body for reply in lists[:3]] == [True] * 3
        assert http.post("/api/show", {"model": "llama"}).status == 200
        assert ask(http, "llama").answer["choices"] == told
        wait_for_rest(server)
        assert server.models._unload_one()
        assert [http.get(route).status for route in LISTS] == [200] * len(LISTS)
        assert [model["id"] for model in http.get("/v1/models").json["data"]] == ["tiny", "qwen2"]
        assert http.get("/v1/models/llama").status == 404
        refused = ask(http, "llama")
        assert (refused.status, refused.error["code"]) == (422, "model_unusable")


@pytest.mark.parametrize("route", ["/v1/models", "/v1/models/llama", "/api/tags", "/api/ps"])
def test_what_is_listed_is_not_unloaded_meanwhile(server, http, monkeypatch, route):
    ask(http, "llama")
    listed = ServerModels.others.fget
    assert listed is not None
    unloaded: list[bool] = []

    def others(models: ServerModels) -> object:
        """Somebody wants room as soon as it is known what to list."""
        found = listed(models)
        unloaded.append(models._unload_one())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ServerModels, "others", property(others))
        reply = http.get(route)
    assert (reply.status, b"llama" in reply.body) == (200, True)
    assert not any(unloaded)
    wait_for_rest(server)
    assert server.models._unload_one()


def test_where_a_request_names_the_model_meanwhile_the_next_one_is_unloaded(
    server, http, monkeypatch
):
    for name in NAMES:
        ask(http, name)
    wait_for_rest(server)
    thread, leases = server.models._thread, []
    assert thread is not None
    call = thread.call

    def choose(function: Callable[..., object], *arguments: object) -> object:
        chosen = call(function, *arguments)
        if not leases:
            leases.append(server.models.lease("llama"))
        return chosen

    with monkeypatch.context() as patch:
        patch.setattr(thread, "call", choose)
        assert server.models._unload_one()
    found = server.models.others
    assert (found["llama"] is None, found["qwen2"] is None) == (False, True)
    assert not server.models._unload_one()
    leases[0].release()
    assert server.models._unload_one()
