"""Answers whose tokens a request gives: what a model says of each, with a receipt that verifies."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.serve.receipts.document import signed_document
from harness.serve.receipts.keys import open_key
from harness.serve.run import Running
from tests.serve.receipt_lies import problems

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "abc", "max_tokens": 12, "seed": 5, "temperature": 0.9, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 4}
SAID = [70, 71, 72, 5, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("receipts") / "folder"


@pytest.fixture(scope="module")
def server(serve, folder) -> Iterator[Running]:
    with serve(receipts=folder, draft=3) as server:
        yield server


def test_the_answer_of_a_model_forced_on_it_is_the_same_answer(http):
    """Texts and log-probabilities to the bit; other seeds and temperatures change nothing."""
    own = http.post(COMPLETIONS, {**TEXT, "logprobs": 3, "return_token_ids": True}).json
    (choice,) = own["choices"]
    body = {**TEXT, "logprobs": 3, "return_token_ids": True, "force_tokens": choice["token_ids"]}
    for more in ({}, {"temperature": 0, "seed": 9}, {"max_tokens": None}, {"top_k": 1}):
        again = http.post(COMPLETIONS, {**body, **more}).json
        assert again["choices"] == own["choices"]
        assert again["usage"]["completion_tokens"] == 12
    without = {**body, "ignore_eos": False}
    assert http.post(COMPLETIONS, without).json["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_cached_answer_that_differs_is_no_difference_of_prompts(http, path):
    """Both answers fill a page, and differ behind the prompt that they share."""
    body = {**(TEXT if path == COMPLETIONS else TALK), "max_tokens": None}
    for last in (71, 72):
        reply = http.post(path, {**body, "force_tokens": [last] * 24})
        assert reply.status == 200
        assert "first_difference" not in reply.json["x_zinc"]["cached"]


def test_a_conversation_and_its_stream(http):
    body = {**TALK, "max_tokens": None, "logprobs": True, "top_logprobs": 2, "force_tokens": SAID}
    (choice,) = http.post(CHAT, body).json["choices"]
    listed = choice["logprobs"]["content"]
    assert len(listed) == len(SAID)
    assert all(len(one["top_logprobs"]) == 2 for one in listed)
    assert choice["finish_reason"] == "length"
    lines = http.post(CHAT, {**body, "stream": True}).body.split(b"\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    parts = [one["choices"][0] for one in chunks if one["choices"]]
    assert (
        "".join(one["delta"].get("content") or "" for one in parts)
        == (choice["message"]["content"])
    )
    streamed = [entry for one in parts if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert streamed == listed


def test_scores_are_those_of_the_score_route(http):
    body = {**TEXT, "max_tokens": None, "prompt": [8, 9, 10], "force_tokens": SAID, "logprobs": 1}
    (choice,) = http.post(COMPLETIONS, body).json["choices"]
    scored = http.post("/v1/score", {"input": [8, 9, 10, *SAID], "start": 3}).json["data"][0]
    assert choice["logprobs"]["token_logprobs"] == scored["logprobs"][3:]
    echoed = http.post(COMPLETIONS, {**body, "echo": True}).json["choices"][0]["logprobs"]
    whole = http.post("/v1/score", {"input": [8, 9, 10, *SAID]}).json["data"][0]
    assert echoed["token_logprobs"] == whole["logprobs"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_its_receipt_verifies_and_another_token_is_named(http, server, folder, path):
    body = {**(TEXT if path == COMPLETIONS else TALK), "max_tokens": None, "force_tokens": SAID}
    answer = http.post(path, body).json
    document = http.get(f"/v1/receipts/{answer['id']}").json
    model = server.service.model

    assert document["payload"]["choices"][0]["tokens"] == SAID
    assert problems(document, model) == problems(document, model, 10) == []
    document["payload"]["choices"][0]["tokens"][2] ^= 1
    document = signed_document(document["payload"], document["leaves"], open_key(folder))
    for sample in (None, 10):
        (problem,) = problems(document, model, sample)
        assert problem.startswith(("tokens: choice 0: step 2", "bits: choice 0: step 3"))
