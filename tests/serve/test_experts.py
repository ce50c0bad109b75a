"""The experts that every token of a mixture used, as a request asks for them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.families_table import FAMILIES
from tests.needs import need_device
from tests.serve.http import Http

TEXT = {"prompt": [1, 2, 3, 4], "max_tokens": 6, "seed": 5, "temperature": 0.9, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def path(synthetic_model) -> Path:
    return synthetic_model(**FAMILIES["qwen3moe"], quant="q4_k_m")


@pytest.fixture(scope="module", params=["cpu", "native", "opencl"])
def http(request, serve, path, tmp_path_factory) -> Iterator[Http]:
    folder = tmp_path_factory.mktemp("receipts") / "folder"
    opening = serve(path=path, tier=request.param, experts=True, receipts=folder, draft=3)
    with need_device(lambda: opening) as server:
        yield Http(server.url)


def test_answers_have_those_of_every_token(http):
    """Prompt and answer but the last token; of each choice its own, with receipts and digests; an
    answer of the same tokens has the same, and one that does not ask has none."""
    body = {**TEXT, "experts": True, "n": 2, "return_token_ids": True}
    plain = http.post(COMPLETIONS, {**body, "experts": False}).json
    answer = http.post(COMPLETIONS, body).json
    assert answer["choices"] == plain["choices"]
    assert "experts" not in plain["x_zinc"]
    assert "receipt" in answer["x_zinc"]
    for choice, used in zip(answer["choices"], answer["x_zinc"]["experts"], strict=True):
        assert [len(used), len(used[0]), len(used[0][0])] == [9, 2, 3]
        forced = {**TEXT, "experts": True, "force_tokens": choice["token_ids"]}
        assert http.post(COMPLETIONS, forced).json["x_zinc"]["experts"] == [used]
        hashed = {**forced, "logits_digest": True, "prompt_logprobs": 1}
        assert http.post(COMPLETIONS, hashed).json["x_zinc"]["experts"] == [used]


def test_the_last_line_of_a_stream_has_them(http):
    whole = http.post(COMPLETIONS, {**TEXT, "experts": True}).json["x_zinc"]["experts"]
    asked = {"stream": True, "stream_options": {"include_usage": True}, "experts": True}
    lines = http.post(COMPLETIONS, {**TEXT, **asked}).body.split(b"\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert chunks[-1]["x_zinc"]["experts"] == whole


def test_models_and_servers_without_them_refuse(server, serve, path):
    refused = Http(server.url).post(COMPLETIONS, {**TEXT, "experts": True})
    assert (refused.status, refused.error["param"]) == (400, "experts")
    assert "the model has none" in refused.error["message"]
    with serve(path=path) as other:
        refused = Http(other.url).post(COMPLETIONS, {**TEXT, "experts": True})
    assert (refused.status, refused.error["param"]) == (400, "experts")
    assert "built without them" in refused.error["message"]
