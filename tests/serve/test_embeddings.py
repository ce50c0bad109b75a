"""Vectors of texts, as OpenAI's client asks for them: the same bits in any company."""

import base64
import math
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from contract.errors import QueueFull
from contract.types import LOCAL_TENANT, Request
from harness.host.pooling import Pool, Pooling
from harness.serve import readings
from harness.serve.caller import Caller
from harness.serve.embeddings import EmbeddingRequest, embed
from harness.serve.errors import ApiError
from harness.serve.keys import new_key
from harness.serve.service import FailedWhileRunning
from harness.serve.streams import CLIENT_LEFT
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import HIDDEN, ModelRunner
from tests.held_steps import hold_steps
from tests.serve.http import Http
from tests.serve.tenants import write_tenants

TEXTS = ["The sky is blue.", "a", "Why? " * 30, "another text of some length"]


def vectors(http: Http, texts: object, **more: object) -> list[list[float]]:
    data = http.post("/v1/embeddings", {"input": texts, **more}).answer["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return [each["embedding"] for each in data]


def test_openais_client(client, server):
    """It asks for base64 unless told otherwise, and gets the numbers that float gives."""
    asked = client.embeddings.create(model="tiny", input=TEXTS)
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    width = server.service.model.model.config.hidden
    assert [len(each.embedding) for each in asked.data] == [width] * len(TEXTS)
    for one, other in zip(asked.data, plain.data, strict=True):
        assert one.embedding == other.embedding
        assert math.isclose(math.fsum(x * x for x in one.embedding), 1.0, rel_tol=1e-6)
    encode = server.service.model.tokenizer.encode
    assert asked.usage.prompt_tokens == sum(len(encode(text)) for text in TEXTS)
    assert asked.object == "list"


def test_a_vector_is_the_pooled_hidden_states(http, tiny_model_path):
    """Computed here from a runner of other sizes."""
    model = open_model(tiny_model_path)
    limits = Limits(
        slots=1, context=256, pages=16, step_tokens=20, step_rows=19, hidden_states=True
    )
    tokens = model.tokenizer.encode(TEXTS[2])
    pool = Pool(Pooling.MEAN, len(tokens))
    with model.file, CpuTier() as tier, ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner)
        engine.submit(Request(1, tuple(tokens), 0), pool, output=HIDDEN)
        assert len(list(engine.run())) == 1
    assert vectors(http, TEXTS[2])[0] == pool.vector().tolist()
    assert vectors(http, [tokens], dimensions=5)[0] == pool.vector(5).tolist()


def test_texts_and_ids_are_the_same(http, server):
    ids = [server.service.model.tokenizer.encode(text) for text in TEXTS]
    requested = vectors(http, TEXTS)
    assert vectors(http, ids) == requested
    assert vectors(http, ids[0]) == requested[:1]
    coded = vectors(http, TEXTS[0], encoding_format="base64")[0]
    assert np.frombuffer(base64.b64decode(str(coded)), "<f4").tolist() == requested[0]


def test_fewer_dimensions_are_normalised_again(http):
    whole, part = vectors(http, TEXTS[0])[0], vectors(http, TEXTS[0], dimensions=7)[0]
    assert len(part) == 7
    assert math.isclose(math.fsum(x * x for x in part), 1.0, rel_tol=1e-6)
    scale = part[0] / whole[0]
    assert all(math.isclose(p, w * scale, rel_tol=1e-5) for p, w in zip(part, whole, strict=False))


def test_a_client_who_leaves_ends_it(server, monkeypatch):
    """Before its vectors are there, and nothing of it is left in the engine."""
    hold_steps(monkeypatch)
    monkeypatch.setattr(readings, "POLL_SECONDS", 0.0)
    service = server.service
    before = service.ledger.total(LOCAL_TENANT).abandoned
    asked = EmbeddingRequest("a text of some length " * 9)
    with pytest.raises(FailedWhileRunning) as ended:
        embed(service, asked, LOCAL_TENANT, Caller(gone=lambda: True))
    assert ended.value.error is CLIENT_LEFT
    assert service.ledger.total(LOCAL_TENANT).abandoned == before + 1
    assert service.model.driver.call(lambda engine: engine.idle)


def test_what_fails_half_way_has_failed(server, monkeypatch):
    """It is no refusal any more: something was computed."""
    compute, waves = readings._compute, iter((False, True))

    def failing(*given: Any) -> int:
        if next(waves):
            raise QueueFull(1, 1.0)
        return compute(*given)

    monkeypatch.setattr(readings, "_compute", failing)
    before = server.service.ledger.total(LOCAL_TENANT).failed
    with pytest.raises(FailedWhileRunning) as ended:
        embed(server.service, EmbeddingRequest(["a"] * 5), LOCAL_TENANT, Caller())
    assert isinstance(ended.value.error, ApiError)
    assert ended.value.error.status == 503
    assert server.service.ledger.total(LOCAL_TENANT).failed == before + 1


def test_as_many_texts_at_a_time_as_may_wait(serve, http):
    """However few those are."""
    texts = [f"text {number}" for number in range(5)]
    with serve(queue_depth=2) as server:
        assert vectors(Http(server.url), texts) == vectors(http, texts)


def test_a_model_that_fails_makes_no_vector(server, monkeypatch):
    """Of what it had computed when it failed."""
    pipeline = server.service.model.driver.call(lambda engine: engine._pipeline)

    def broken() -> None:
        raise RuntimeError("a step failed")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "read", broken)
        refused = Http(server.url).post("/v1/embeddings", {"input": "abc"})
    assert (refused.status, refused.error["code"]) == (500, "model_failed")
    assert vectors(Http(server.url), "abc")


def test_an_end_is_read_where_the_file_says_so(server, monkeypatch):
    """After texts, not after ids, which are taken as they are."""
    http, model = Http(server.url), server.service.model
    ids = model.tokenizer.encode("abc")
    plain = vectors(http, ids)
    assert vectors(http, "abc") == plain
    ended = vectors(http, [*ids, model.tokenizer.eos_id])
    assert ended != plain
    file = model.model.file
    told = {**file.metadata, "tokenizer.ggml.add_eos_token": True}
    with monkeypatch.context() as patch:
        patch.setattr(file, "_metadata", told)
        assert vectors(http, "abc") == ended
        assert vectors(http, ids) == plain


def test_the_last_of_many_is_looked_at_before_the_first_is_read(http):
    refused = http.post("/v1/embeddings", {"input": [*["a"] * 5, "b " * 200]})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert refused.error["message"].startswith("input[5]: prompt is too long")


def test_vectors_are_counted(serve, tmp_path):
    """And a tenant's context is its limit here, too."""
    key = new_key()
    path = write_tenants(tmp_path, {"a": key}, a={"max_context": 20})
    with (
        serve(tenants=path) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
    ):
        told = client.embeddings.create(model="tiny", input=["a", "bc"]).usage
        with pytest.raises(openai.BadRequestError, match="tokens > 20"):
            client.embeddings.create(model="tiny", input="a " * 30)
        http = Http(server.url)
        total = http.get("/v1/tenants/1/usage", Authorization=f"Bearer {key}").json["total"]
        assert (total["completed"], total["rejected"]) == (1, 1)
        assert total["prompt_tokens"] == told.prompt_tokens
