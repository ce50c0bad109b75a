"""Receipts: made by the server for every kind of answer, verified on every tier, and whatever is
tampered with is named."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.serve.model import ServedModel
from harness.serve.receipts.canonical import canonical
from harness.serve.receipts.document import read_receipts, signed_document
from harness.serve.receipts.keys import open_key
from harness.serve.receipts.tree import tree_root
from harness.serve.receipts.verify import ReceiptDemands, chain_verdict, verify_receipts
from harness.serve.run import Running
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from tests.named_tiers import on_each
from tests.needs import need_device
from tests.paths import ROOT
from tests.serve.http import Http
from tests.serve.receipt_lies import LIES, change, parsed, problems, verifiers

Json = dict[str, Any]
STORED_MODEL = sized_spec("tiny", architecture="qwen3", quant="q4_k_m", seed=21)
TIERS = ("cpu", "native", "opencl", "vulkan")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
SAMPLED = {"prompt": "abc", "max_tokens": 24, "seed": 5, "temperature": 0.8, "ignore_eos": True}
WEATHER = {
    "type": "function",
    "function": {"name": "weather",
                 "parameters": {"type": "object",
                                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                                "required": ["city"], "additionalProperties": False}},
}  # fmt: skip
REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "several choices": ("/v1/chat/completions", {**CHAT, "n": 3, "temperature": 1.0}),
    "stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "tools": ("/v1/chat/completions",
              {**CHAT, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}),
    "completion": ("/v1/completions", SAMPLED),
    "greedy": ("/v1/completions", {**SAMPLED, "temperature": 0, "max_tokens": 40}),
    "several prompts": ("/v1/completions", {**SAMPLED, "prompt": ["abc", "de"], "n": 2}),
    "penalties and biases": ("/v1/completions",
                             {**SAMPLED, "repetition_penalty": 1.3, "frequency_penalty": 0.5,
                              "logit_bias": {"70": 3}, "min_tokens": 20,
                              "stop_token_ids": list(range(64, 128))}),
    "stop string": ("/v1/completions", {**SAMPLED, "stop": ["e", "a", "o"], "max_tokens": 200}),
    "forced answer": ("/v1/completions", {"prompt": "abc", "force_tokens": [70, 5, 71, 9, 30]}),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 8}),
    "message": ("/v1/messages", {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 8}),
    "score": ("/v1/score", {"input": ["hello there", "you"], "top": 2, "start": 1}),
    "embedding": ("/v1/embeddings", {"input": ["hello", "you"], "dimensions": 16}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("receipts") / "folder"


@pytest.fixture(scope="module")
def receipt_server(serve, folder) -> Iterator[Running]:
    with serve(receipts=folder, draft=5, context=768) as server:
        yield server


Made = Callable[[str], Json]


@pytest.fixture(scope="module")
def made(receipt_server) -> Made:
    """``made(name)``: the stored receipt of the answer to a request of REQUESTS."""
    http, known = Http(receipt_server.url), dict[str, Json]()

    def of(name: str) -> Json:
        if name not in known:
            path, body = REQUESTS[name]
            assert http.post(path, body).status == 200
            number = http.get("/v1/receipts").json["data"][-1]["id"]
            known[name] = http.get(f"/v1/receipts/{number}").json
        return copy.deepcopy(known[name])

    return of


@pytest.fixture(scope="module")
def opened(tiny_model_path, tmp_path_factory) -> Iterator[Callable[..., ServedModel]]:
    """Verifying models of other sizes than the server's."""
    sizes = {"context": 1024, "slots": 2, "biases": 8, "repeat_last_n": 80}
    folder = tmp_path_factory.mktemp("digests")
    yield from verifiers(folder, tiny_model_path, **sizes, top_log_probabilities=20)


Sign = Callable[[Json], Json]


@pytest.fixture
def sign(folder, receipt_server) -> Sign:
    """A receipt as a server that lies would sign it: its own key, and roots that fit."""

    def signed(document: Json) -> Json:
        payload = document["payload"]
        for choice, leaves in zip(payload["choices"], document["leaves"], strict=True):
            choice["root"] = tree_root([bytes.fromhex(leaf) for leaf in leaves]).hex()
        return signed_document(payload, document["leaves"], open_key(folder))

    return signed


@pytest.mark.parametrize(("tier", "name"), on_each(TIERS, REQUESTS, "completion", "embedding"))
def test_every_answer_has_a_receipt_that_verifies(made, opened, tier, name):
    """Whole and by sample, on every tier, by an engine of other sizes."""
    document, model = made(name), opened(tier)
    assert problems(document, model) == []
    assert problems(document, model, sample=3) == []


def test_all_steps_may_be_sampled(made, opened):
    assert problems(made("several choices"), opened(), sample=10_000) == []


@pytest.mark.parametrize(
    ("tier", "lie"), on_each(TIERS, LIES, "a step's digest replaced, the tree consistent")
)
def test_a_lie_that_is_signed_is_named(made, opened, sign, lie, tier):
    """By a whole verification, and by a sample of all steps where steps are concerned."""
    document = made("completion")
    changes, named = LIES[lie]
    change(document, changes)
    found = problems(sign(document), opened(tier))
    assert found
    assert found[0].startswith(named), found
    sampled = problems(sign(document), opened(tier), sample=10_000)
    assert sampled
    if lie != "the answer cut":
        assert sampled[0].startswith(named), sampled
    else:
        assert sampled[0].startswith("finish: choice 0"), sampled


@pytest.mark.parametrize("lie", LIES)
def test_a_change_without_the_key_breaks_the_signature(made, opened, lie):
    document = made("completion")
    change(document, LIES[lie][0])
    found = problems(document, opened())
    expected = "steps: choice 0: the root" if lie.startswith("a step's") else "signature: "
    assert any(problem.startswith(expected) for problem in found), found


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "cpu"])
def test_every_tier_makes_the_same_leaves(made, serve, tmp_path, tier):
    """By the tier's own digests, and by the rule where rows are read back for another reason."""
    with ExitStack() as owned:
        server = need_device(
            lambda: owned.enter_context(serve(tier=tier, receipts=tmp_path, slots=2))
        )
        http = Http(server.url)
        answer = http.post("/v1/completions", SAMPLED).json
        document = http.get(f"/v1/receipts/{answer['id']}").json
        # Whole rows are hashed, too: then leaves are made of rows.
        answer = http.post("/v1/completions", {**SAMPLED, "logits_digest": True}).json
        both = http.get(f"/v1/receipts/{answer['id']}").json
    expected = made("completion")
    assert document["leaves"] == both["leaves"] == expected["leaves"]
    choices = [one["payload"]["choices"][0] for one in (document, expected)]
    assert choices[0]["tokens"] == choices[1]["tokens"]
    assert choices[0]["root"] == choices[1]["root"]


def test_another_tenants_receipt_is_refused(made, opened, sign):
    document = made("completion")
    demands = ReceiptDemands(tenant="somebody")
    (verdict,) = verify_receipts([parsed(document)], opened(), demands)
    assert verdict.problems == ["tenant: the receipt is 'local''s, not 'somebody''s"]
    # Signed as the other's, it does not fit into the other's chain.
    document["payload"]["tenant"] = {"id": 3, "name": "somebody"}
    (verdict,) = verify_receipts([parsed(sign(document))], opened(), demands)
    assert verdict.problems == []
    own = copy.deepcopy(document)
    own["payload"] |= {"number": document["payload"]["number"] - 1, "previous": None}
    said = chain_verdict([parsed(sign(own)), parsed(sign(document))])
    assert any("names another receipt before it" in line for line in said)


def test_an_untrusted_key_is_named(made, opened, tmp_path):
    document = made("completion")
    stranger = open_key(tmp_path / "stranger")
    forged = signed_document(document["payload"], document["leaves"], stranger)
    demands = ReceiptDemands(trusted=[document["signature"]["key"]], sample=1)
    (verdict,) = verify_receipts([parsed(forged)], opened(), demands)
    assert verdict.problems[0].startswith("key: ")
    (verdict,) = verify_receipts([parsed(document)], opened(), demands)
    assert verdict.problems == []


def test_a_chain_with_a_link_removed_is_found(made, receipt_server):
    for name in ("completion", "chat", "greedy"):
        made(name)
    http = Http(receipt_server.url)
    listed = http.get("/v1/receipts").json["data"]
    chain = [parsed(http.get(f"/v1/receipts/{one['id']}").json) for one in listed]
    assert [one["sha256"] for one in listed] == [receipt.digest for receipt in chain]
    assert chain_verdict(chain) == []
    said = chain_verdict([chain[0], *chain[2:]])
    assert said[0] == "different: chain: receipt 1 is followed by 3"
    assert "names another receipt before it" in said[1]
    assert chain_verdict(chain[1:]) == ["not whole: the chain begins with receipt 2"]
    assert chain_verdict([chain[1], chain[0]])[0].startswith("different: chain: receipt 2 is")


def test_receipts_are_only_their_tenants(receipt_server, made):
    made("completion")
    http = Http(receipt_server.url)
    assert http.get("/v1/receipts/cmpl-unknown").status == 404
    assert http.get("/v1/receipts?after=x").status == 400
    assert http.get("/v1/receipts?after=100000").json["data"] == []


def test_the_answer_names_its_receipt(receipt_server):
    http = Http(receipt_server.url)
    answer = http.post("/v1/completions", SAMPLED).json
    noted = answer["x_zinc"]["receipt"]
    assert noted["id"] == answer["id"]
    document = http.get(f"/v1/receipts/{answer['id']}").json
    assert parsed(document).digest == noted["sha256"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {name: answer["usage"][name] for name in counts} == document["payload"]["usage"]


def test_the_latest_is_that_of_the_last_answer(receipt_server):
    http = Http(receipt_server.url)
    for _ in range(2):
        answer = http.post("/v1/completions", SAMPLED).json
        latest = http.get("/v1/receipts/latest").json
        assert latest["payload"]["id"] == answer["id"]
        assert latest == http.get(f"/v1/receipts/{answer['id']}").json


def test_a_request_may_do_without(receipt_server, server):
    http = Http(receipt_server.url)
    before = len(http.get("/v1/receipts").json["data"])
    answer = http.post("/v1/completions", {**SAMPLED, "receipt": False}).json
    assert "receipt" not in answer["x_zinc"]
    assert len(http.get("/v1/receipts").json["data"]) == before
    refused = Http(server.url).post("/v1/completions", {**SAMPLED, "receipt": True})
    assert refused.status == 400
    assert refused.error["param"] == "receipt"
    assert Http(server.url).get("/v1/receipts").status == 404


def test_receipts_change_no_answer(receipt_server, server):
    body = {**SAMPLED, "logits_digest": True}
    with_receipt = Http(receipt_server.url).post("/v1/completions", body).json
    without = Http(server.url).post("/v1/completions", body).json
    assert with_receipt["choices"] == without["choices"]
    digests = [one["x_zinc"]["logits_sha256"] for one in (with_receipt, without)]
    assert digests[0] == digests[1]


def test_a_payload_is_signed_in_canonical_form(made):
    document = made("completion")
    shuffled = json.loads(
        json.dumps(document, indent=2), object_pairs_hook=lambda pairs: dict(reversed(pairs))
    )
    assert parsed(shuffled).is_signed
    assert canonical(shuffled["payload"]) == canonical(document["payload"])


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "vulkan"])
def test_a_stored_receipt_still_verifies(opened, tmp_path_factory, tier):
    """A receipt of 256 tokens that ``run --receipt`` of the native tier wrote once; its model is
    made by its specification."""
    path = tmp_path_factory.mktemp("stored") / "model.gguf"
    write_synthetic(path, STORED_MODEL)
    (receipt,) = read_receipts(ROOT / "goldens" / "receipt.json")
    assert len(receipt.payload.choices[0].tokens) == 256
    demands = ReceiptDemands(sample=8, trusted=[receipt.signature.key])
    (verdict,) = verify_receipts([receipt], opened(tier, path), demands)
    assert verdict.problems == []
    if tier != "cpu":
        (verdict,) = verify_receipts([receipt], opened(tier, path), ReceiptDemands())
        assert verdict.problems == []


@pytest.mark.parametrize("name", ["score", "embedding"])
def test_a_changed_result_is_found(made, opened, sign, name):
    """The digest of a result, the text, the counts, a result left out."""
    lies: dict[str, dict[str, Any]] = {
        "bits: result 1": {"payload.results.1": "0" * 64},
        "prompt: ": {"payload.request": json.dumps({"input": ["hello", "me"]})},
        "request: ": {"payload.request": '{"input": []}'},
        "usage: prompt_tokens": {"payload.usage.prompt_tokens": 9999},
        "results: 1 of 2": {"payload.results": lambda results: results[:-1]},
    }
    for named, changes in lies.items():
        document = made(name)
        change(document, changes)
        found = problems(sign(document), opened())
        assert any(problem.startswith(named) for problem in found), (named, found)
