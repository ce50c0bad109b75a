"""However a request ends, its model can be unloaded afterwards."""

from functools import partial
from typing import Any

from harness.named_adapters import NamedAdapter
from harness.serve.run import Running
from tests.adapters import write_adapter
from tests.patience import wait_until
from tests.serve.http import Http, posted

TURNS = [{"role": "user", "content": "a"}]
SHORT = {"max_tokens": 2}
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "whole": ("/v1/completions", {"prompt": "a", **SHORT}, 200),
    "stream": ("/v1/completions", {"prompt": "a", "stream": True, **SHORT}, 200),
    "conversation": ("/v1/chat/completions", {"messages": TURNS, **SHORT}, 200),
    "wrong type": ("/v1/completions", {"prompt": 1.5}, 400),
    "too long": ("/v1/completions", {"prompt": "ab" * 300, "stream": True}, 400),
    "no text": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "suffix": "b"}, 400),
    "format": ("/v1/completions", {"prompt": "a", "guided_regex": "("}, 400),
    "vectors": ("/v1/embeddings", {"input": ["a", "b"]}, 200),
    "scores": ("/v1/score", {"input": ["ab", "cd"]}, 200),
    "tokens": ("/tokenize", {"prompt": "a"}, 200),
    "no such token": ("/detokenize", {"tokens": [-1]}, 400),
    "messages": ("/v1/messages", {"messages": TURNS, **SHORT}, 200),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 2}, 200),
    "lines": ("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 2}}, 200),
    "load": ("/api/generate", {}, 200),
    "own route": ("/completion", {"prompt": "a", "n_predict": 2, "stream": True}, 200),
}


def end(server: Running, model: str, way: str) -> None:
    path, body, status = WAYS[way]
    reply = Http(server.url).post(path, {"model": model, **body})
    assert reply.status == status, (way, reply.body[:200])


def leave(server: Running, model: str, stream: bool) -> None:
    """A client goes while its answer is computed."""
    with Http(server.url).connected() as connection:
        asked = {"model": model, "prompt": "a", "max_tokens": 200, "ignore_eos": True}
        connection.sendall(posted("/v1/completions", {**asked, "stream": stream}))
        if stream:
            connection.recv(1)
        else:
            wait_until(lambda: all(server.models.others.values()))


def test_a_model_can_be_unloaded(serve, synthetic_model):
    path = synthetic_model(architecture="llama", quant="q8_0")
    with serve(beside={"llama": path}) as server:
        ends = [partial(end, server, "llama", way) for way in WAYS]
        ends += [partial(leave, server, "llama", stream) for stream in (False, True)]
        for one in ends:
            one()
            assert server.models.others["llama"] is not None, one
            wait_until(server.models._unload_one)
            assert server.models.others["llama"] is None, one


def test_a_model_with_adapters_can_be_unloaded(serve, tiny_model_path, synthetic_model, tmp_path):
    """Requests by the name of an adapter, of the model that answered before another was chosen."""
    other = synthetic_model(architecture="llama", quant="q8_0")
    lora = (NamedAdapter("style", write_adapter(tmp_path / "a.gguf", tiny_model_path)),)
    with serve(beside={"llama": other}, lora=lora) as server:
        for way in WAYS:
            end(server, "style", way)
        server.models.lease("llama").release()
        for stream in (False, True):
            leave(server, "style", stream)
        server.models.activate("llama", other)
        wait_until(server.models._unload_one)
        assert server.models.others == {"tiny": None}
