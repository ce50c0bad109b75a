"""Receipts of ranked documents: verified by another tier, and each change is named."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.host.options import SessionOptions
from harness.serve.model import ModelOptions, ServedModel
from harness.serve.receipts.document import signed_document
from harness.serve.receipts.keys import open_key
from harness.serve.rerank import INSTRUCTION, TEMPLATE
from tests.serve.http import Http
from tests.serve.receipt_lies import open_verifier, problems
from tests.serve.speaking_models import CONTEXT, templated_model

Json = dict[str, Any]
ASKED = {
    "query": "capital of France",
    "documents": ["Paris is one.", {"text": "Berlin is not."}, "", "Paris is one."],
    "top_n": 2,
}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    template = {"tokenizer.chat_template.rerank": TEMPLATE.replace("{instruction}", INSTRUCTION)}
    folder = tmp_path_factory.mktemp("reranker")
    return templated_model(folder, "reranker", PLAIN, ("yes", "no"), **template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("receipts") / "folder"


@pytest.fixture(scope="module")
def made(serve, path, folder) -> str:
    """The receipt of an answer that tells two of four documents."""
    with serve(path=path, context=CONTEXT, receipts=folder) as server:
        http = Http(server.url)
        answer = http.post("/v1/rerank", ASKED).json
        assert len(answer["results"]) == 2
        noted = answer["x_zinc"]["receipt"]
        document = http.get(f"/v1/receipts/{noted['id']}").json
    assert document["payload"]["kind"] == "rerank"
    return json.dumps(document)


@pytest.fixture(scope="module")
def opened(path, tmp_path_factory) -> Iterator[Callable[[str], ServedModel]]:
    digests = tmp_path_factory.mktemp("digests") / "digests.json"
    with ExitStack() as owned:
        known: dict[str, ServedModel] = {}

        def model(tier: str) -> ServedModel:
            if tier not in known:
                session = SessionOptions(tier=tier, context=CONTEXT, slots=3)
                options = ModelOptions(session, "other", digests)
                known[tier] = open_verifier(path, options, owned)
            return known[tier]

        yield model


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl"])
def test_it_verifies(made, opened, tier):
    """Every document has a result, also those that the answer leaves out."""
    document = json.loads(made)
    assert len(document["payload"]["results"]) == 4
    assert document["payload"]["results"][0] == document["payload"]["results"][3]
    assert problems(document, opened(tier)) == []
    assert problems(document, opened(tier), sample=2) == []


def change_query(payload: Json) -> None:
    payload["request"] = json.dumps(ASKED | {"query": "capital of Spain"})


def swap_results(payload: Json) -> None:
    results = payload["results"]
    results[1], results[2] = results[2], results[1]


CHANGES: dict[str, tuple[Callable[[Json], object], str]] = {
    "a score": (lambda payload: payload["results"].__setitem__(2, "0" * 64), "bits: result 2"),
    "the order": (swap_results, "bits: result 1"),
    "the query": (change_query, "prompt: "),
    "a document left out": (lambda payload: payload["results"].pop(), "results: 3 of 4"),
    "no documents": (lambda payload: payload.update(request='{"query": "x"}'), "request: "),
    "the counts": (lambda payload: payload["usage"].update(prompt_tokens=1), "usage: "),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_is_signed_is_named(made, opened, folder, what):
    document = json.loads(made)
    change, named = CHANGES[what]
    change(document["payload"])
    document = signed_document(document["payload"], [], open_key(folder))
    found = problems(document, opened("cpu"))
    assert any(problem.startswith(named) for problem in found), found


def test_a_change_without_the_key_breaks_the_signature(made, opened):
    document = json.loads(made)
    swap_results(document["payload"])
    assert problems(document, opened("cpu"))[0].startswith("signature: ")
