"""What the server says of itself, and the small routes."""

import hashlib
import os
from contextlib import closing
from typing import Any

import jsonschema
import pytest

from contract.arithmetic import PAGE_TOKENS
from contract.errors import ModelFileError
from harness.file_digests import cached_digest, file_digests
from harness.serve.page import HEADERS, read_page
from harness.serve.routes import ROUTES
from harness.serve.wire import ChatRequest
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.model.open import open_model

MESSAGES = [{"role": "user", "content": "hello <|im_end|>"}]


def test_the_document_has_every_route_and_field(http):
    """Made from the table and the types that serve: neither can be forgotten."""
    document = http.get("/openapi.json").json
    operations = {
        operation["operationId"]: operation
        for methods in document["paths"].values()
        for operation in methods.values()
    }
    assert set(operations) == {route.name for route in ROUTES}
    schemas = document["components"]["schemas"]
    chat = operations["chat"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schemas[chat["$ref"].rpartition("/")[2]]["properties"]
    assert set(fields) == set(ChatRequest.__struct_fields__)
    assert str(fields["temperature"]).count("100") == 1


def test_every_reference_of_the_document_leads_somewhere(http):
    document = http.get("/openapi.json").json
    targets = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                targets.add(value["$ref"])
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(document)
    assert len(targets) > 4
    for target in targets:
        assert target.rpartition("/")[2] in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        *((fields, {"content", "timings", "x_zinc"}) for fields in (None, [])),
        (["content", "timings/prompt_n"], {"content", "timings/prompt_n"}),
        (["made_up"], set()),
    ],
)
def test_an_answer_of_named_fields_is_as_documented(http, fields, found):
    """It may lack any field that was not named."""
    document = http.get("/openapi.json").json
    described = document["paths"]["/completion"]["post"]["responses"]["200"]["content"]
    schema = described["application/json"]["schema"]
    body = {"prompt": "a", "n_predict": 1, "response_fields": fields}
    answer = http.post("/completion", body).json
    jsonschema.validate(answer, {**schema, "components": document["components"]})
    assert answer.keys() >= found if not fields else answer.keys() == found
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {**answer, "content": 1}, {**schema, "components": document["components"]}
        )


def test_tokens_and_back(http):
    told = http.post("/tokenize", {"prompt": "hello"}).json
    assert told["count"] == len(told["tokens"]) > 0
    assert http.post("/detokenize", {"tokens": told["tokens"]}).json["prompt"] == "hello"
    assert http.post("/detokenize", {"tokens": [10**6]}).error["param"] == "tokens"
    assert http.post("/tokenize", {}).error["param"] == "prompt"
    both = {"prompt": "a", "messages": MESSAGES}
    assert http.post("/tokenize", both).error["param"] == "prompt"


def test_a_user_cannot_write_control_tokens(server, http):
    """The template's own ones are single tokens, those of a message are its text."""
    prompt = http.post("/apply-template", {"messages": MESSAGES}).json["prompt"]
    assert "hello <|im_end|>" in prompt
    tokens = http.post("/tokenize", {"messages": MESSAGES}).json["tokens"]
    trusted = server.service.model.tokenizer.encode(prompt, parse_special=True)
    assert len(tokens) > len(trusted)


def test_a_conversation_costs_what_tokenize_says(http):
    counted = http.post("/tokenize", {"messages": MESSAGES}).json["count"]
    answer = http.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json
    assert answer["usage"]["prompt_tokens"] == counted


def test_developer_and_parts_are_what_templates_know(http):
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    asked = [{"role": "developer", "content": parts}, *MESSAGES]
    same = [{"role": "system", "content": "be brief"}, *MESSAGES]
    prompts = [http.post("/apply-template", {"messages": m}).json["prompt"] for m in (asked, same)]
    assert prompts[0] == prompts[1]


def test_state_of_the_server(server, http):
    health = http.get("/health").json
    assert health["status"] == "ok"
    plan, limits = server.service.model.plan, server.service.model.limits
    memory, context = health["memory"], health["context"]
    assert memory["weights_bytes"] == sum(plan.weights.values()) > 0
    parts = ("weights_bytes", "context_bytes", "runtime_bytes")
    assert sum(memory[part] for part in parts) == memory["total_bytes"] == plan.total
    assert all(memory[part] > 0 for part in parts)
    assert memory["budget_bytes"] == server.service.model.budget >= plan.budgeted
    told = http.get("/metrics").body.decode()
    for part, nbytes in memory.items():
        labels = f'model_name="{health["model"]}",part="{part.removesuffix("_bytes")}"'
        (line,) = (one for one in told.splitlines() if f"memory_bytes{{{labels}}}" in one)
        assert float(line.split()[-1]) == nbytes
    model = server.service.model
    labels = f'device="{model.device}",model_name="{model.name}",tier="{model.tier}"'
    assert f"zinc_rt:model_device{{{labels}}} 1.0" in told.splitlines()
    assert context["slots"] == limits.slots
    assert context["tokens_per_slot"] == limits.context
    assert context["reserved_tokens"] == limits.pages * PAGE_TOKENS
    held = context["active_tokens"] + context["cached_tokens"]
    assert 0 <= held <= context["reserved_tokens"]
    assert http.get("/ready").json["status"] == "ready"
    assert http.get("/version").json["fingerprint"] == server.service.model.fingerprint


def test_the_page_is_what_was_there(tmp_path):
    """Files by name and type; a link out of the folder is none of it."""
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "app.js").write_text("1")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    page = read_page(tmp_path)
    assert {path: file.content_type for path, file in page.items()} == {
        "/": "text/html; charset=utf-8",
        "/page/app.js": "text/javascript; charset=utf-8",
    }
    assert read_page(tmp_path / "none") == {}


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
def test_every_answer_has_the_policy(http, path):
    headers = http.get(path).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_a_digest_is_kept_until_the_file_changes(tmp_path):
    file, kept = tmp_path / "model", tmp_path / "cache" / "digests.json"
    file.write_bytes(b"one")
    assert cached_digest(file, file.stat(), kept, lambda: "first") == "first"
    assert cached_digest(file, file.stat(), kept, lambda: pytest.fail("computed")) == "first"
    file.write_bytes(b"other")
    assert cached_digest(file, file.stat(), kept, lambda: "second") == "second"
    kept.write_text("[")
    assert cached_digest(file, file.stat(), kept, lambda: "third") == "third"


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_digests_are_of_the_files_that_are_open(tmp_path, change):
    """A model takes a minute to load, and its file may have changed hands when its digest is asked
    for: receipts and the disk cache would name another model's file."""
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for number, each in enumerate((path, other)):
        write_synthetic(each, sized_spec("tiny", seed=number))
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    with closing(open_model(path)) as model:
        if change == "replaced":
            other.replace(path)
        else:
            path.unlink()
        for kept in (tmp_path / "a.json", tmp_path / "a.json", tmp_path / "b.json"):
            assert file_digests(model, kept) == [own]
            if change == "replaced":
                assert cached_digest(path, path.stat(), kept, lambda: "computed") == "computed"


def test_a_model_that_was_written_to_has_no_digest(tmp_path):
    """Neither the bytes of before nor those of now are what it computes with."""
    path = tmp_path / "model.gguf"
    write_synthetic(path, sized_spec("tiny"))
    with closing(open_model(path)) as model:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        os.utime(path, ns=(1, 1))
        with pytest.raises(ModelFileError, match="was written to since it was opened"):
            file_digests(model, tmp_path / "digests.json")


def test_streams_are_of_a_type_of_their_own(http):
    """Events, named where their clients expect names, or lines of JSON."""
    paths = http.get("/openapi.json").json["paths"]

    def content(path: str) -> dict[str, Any]:
        found: dict[str, Any] = paths[path]["post"]["responses"]["200"]["content"]
        return found

    for path, kind in (("/v1/chat/completions", "message"), ("/v1/messages", None)):
        event = content(path)["text/event-stream"]["schema"]["properties"]["event"]
        assert event == ({"type": "string"} if kind is None else {"const": kind})
    assert list(content("/api/chat")) == ["application/json", "application/x-ndjson"]
