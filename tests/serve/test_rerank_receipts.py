"""Receipts of ranked documents: verified by another tier, and each change is named."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.serve.model import ServedModel
from harness.serve.receipts.document import signed_document
from harness.serve.receipts.keys import open_key
from harness.serve.rerank import INSTRUCTION, TEMPLATE
from tests.serve.http import Http
from tests.serve.receipt_lies import change, problems, verifiers
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
def opened(path, tmp_path_factory) -> Iterator[Callable[..., ServedModel]]:
    yield from verifiers(tmp_path_factory.mktemp("digests"), path, context=CONTEXT, slots=3)


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl"])
def test_it_verifies(made, opened, tier):
    """Every document has a result, also those that the answer leaves out."""
    document = json.loads(made)
    assert len(document["payload"]["results"]) == 4
    assert document["payload"]["results"][0] == document["payload"]["results"][3]
    assert problems(document, opened(tier)) == []
    assert problems(document, opened(tier), sample=2) == []


OTHER = json.dumps(ASKED | {"query": "capital of Spain"})
CHANGES: dict[str, tuple[Json, str]] = {
    "a score": ({"results.2": "0" * 64}, "bits: result 2"),
    "the order": ({"results": lambda them: [them[n] for n in (0, 2, 1, 3)]}, "bits: result 1"),
    "the query": ({"request": OTHER}, "prompt: "),
    "a document left out": ({"results": lambda results: results[:-1]}, "results: 3 of 4"),
    "no documents": ({"request": '{"query": "x"}'}, "request: "),
    "the counts": ({"usage.prompt_tokens": 1}, "usage: "),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_is_signed_is_named(made, opened, folder, what):
    document = json.loads(made)
    changes, named = CHANGES[what]
    change(document["payload"], changes)
    document = signed_document(document["payload"], [], open_key(folder))
    found = problems(document, opened("cpu"))
    assert any(problem.startswith(named) for problem in found), found


def test_a_change_without_the_key_breaks_the_signature(made, opened):
    document = json.loads(made)
    change(document["payload"], CHANGES["the order"][0])
    assert problems(document, opened("cpu"))[0].startswith("signature: ")
