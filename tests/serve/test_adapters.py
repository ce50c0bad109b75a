"""LoRA adapters of a server: chosen by number and scale as llama.cpp's clients do, or by name as
vLLM's; a receipt and a replay name them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from contract.errors import ConfigError
from contract.types import Request, SamplingParams
from harness.cli.main import main
from harness.host.options import Recording, SessionOptions
from harness.host.session import Session
from harness.named_adapters import NamedAdapter
from harness.serve.keys import new_key
from harness.serve.receipts.document import signed_document
from harness.serve.receipts.keys import open_key
from harness.serve.run import Running
from tests.adapters import write_adapter
from tests.serve.http import Http, bearer
from tests.serve.tenants import write_tenants
from zinc_rt import LLM
from zinc_rt import SamplingParams as Parameters

Json = dict[str, Any]
PROMPT = "The sky is blue"
ASKED: Json = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT: Json = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
CHOICES: dict[str, tuple[Json, dict[int, float]]] = {
    "none": ({}, {}),
    "name": ({"model": "style"}, {0: 0.5}),
    "the other name": ({"model": "facts"}, {1: 1.0}),
    "number": ({"lora": [{"id": 1, "scale": -0.25}]}, {1: -0.25}),
    "two": ({"lora": [{"id": 1, "scale": 1}, {"id": 0, "scale": 2}]}, {0: 2.0, 1: 1.0}),
    "number beside a name": ({"model": "style", "lora": [{"id": 1, "scale": 1}]}, {1: 1.0}),
    "an empty list": ({"model": "style", "lora": []}, {}),
    "scale 0": ({"lora": [{"id": 0, "scale": 0}]}, {}),
}


@pytest.fixture(scope="module")
def named(tiny_model_path, tmp_path_factory) -> tuple[NamedAdapter, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    first = write_adapter(folder / "a.gguf", tiny_model_path)
    second = write_adapter(folder / "b.gguf", tiny_model_path, rank=9, seed=2)
    return NamedAdapter("style", first, 0.5), NamedAdapter("facts", second)


@pytest.fixture(scope="module")
def adapted(serve, named, tmp_path_factory) -> Iterator[Running]:
    receipts = tmp_path_factory.mktemp("receipts") / "kept"
    with serve(lora=named, receipts=receipts) as server:
        yield server


@pytest.fixture(scope="module")
def twice(serve, named, tmp_path_factory) -> Iterator[Running]:
    """A server with two names for one file, both of which requests use that name none."""
    lora = tuple(NamedAdapter(name, named[0].path) for name in "ab")
    with serve(lora=lora, receipts=tmp_path_factory.mktemp("receipts") / "twice") as server:
        defaults = [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 1.0}]
        assert Http(server.url).post("/lora-adapters", defaults).status == 200
        yield server


@pytest.fixture(scope="module")
def truth(tiny_model_path, named) -> dict[tuple[tuple[int, float], ...], list[int]]:
    """The tokens of the completion with each choice of adapters, by a session."""
    options = SessionOptions(tier="cpu", context=128, lora=named)
    with Session.open(tiny_model_path, options) as session:
        found = {}
        for _, scales in CHOICES.values():
            session.adapters = tuple(scales.items())
            prompt = session.model.tokenizer.encode(PROMPT)
            request = session.generate(prompt, SamplingParams(), 6)
            list(request)
            found[session.adapters] = request.sampled
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
    return found


def post(server: Running, path: str, body: Json, status: int = 200) -> Json:
    reply = Http(server.url).post(path, body)
    assert reply.status == status, reply.body
    answer: Json = reply.json
    return answer


@pytest.mark.parametrize("choice", CHOICES)
def test_choices(adapted, truth, choice):
    """By OpenAI's route and by llama.cpp's: the tokens that a session gives, and what names the
    adapters; without one the fingerprint is the model's own."""
    more, scales = CHOICES[choice]
    expected = truth[tuple(scales.items())]
    said = post(adapted, "/v1/completions", ASKED | more | {"return_token_ids": True})
    assert said["choices"][0]["token_ids"] == expected
    body = ASKED | {"n_predict": 6, "return_tokens": True} | more
    del body["max_tokens"]
    assert post(adapted, "/completion", body)["tokens"] == expected
    model = adapted.service.model
    assert (said["system_fingerprint"] == model.fingerprint) == (not scales)
    digests = [adapter.digest for adapter in model.model.adapters.opened]
    told = {digests.index(one["sha256"]): one["scale"] for one in said["x_zinc"].get("lora", ())}
    assert told == scales


def test_defaults_are_of_requests_that_name_none(adapted, truth):
    """llama.cpp's routes list and set them."""
    http = Http(adapted.url)

    def listed() -> list[float]:
        answer = http.get("/lora-adapters").json
        assert [(one["id"], one["name"], one["path"]) for one in answer] == [
            (0, "style", "a.gguf"),
            (1, "facts", "b.gguf"),
        ]
        return [one["scale"] for one in answer]

    assert listed() == [0.0, 0.0]
    changed = http.post("/lora-adapters", [{"id": 1, "scale": 1.0}])
    try:
        assert changed.json == {"success": True}
        assert listed() == [0.0, 1.0]
        asked = ASKED | {"return_token_ids": True}
        for more, scales in (({}, {1: 1.0}), ({"model": "style"}, {0: 0.5}), ({"lora": []}, {})):
            tokens = post(adapted, "/v1/completions", asked | more)["choices"][0]["token_ids"]
            assert tokens == truth[tuple(scales.items())]
    finally:
        assert http.post("/lora-adapters", []).status == 200
    assert listed() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ([{"id": 2, "scale": 1}], "names adapter 2"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], "names an adapter twice"),
        ([{"id": 0, "scale": 1e9}], "has the scale"),
        ([{"id": 0}], "[0].scale is missing"),
        ([{"id": -1, "scale": 1}], ">= 0"),
    ],
)
def test_refusals(adapted, lora, problem):
    http = Http(adapted.url)
    for path, body in (("/v1/completions", ASKED | {"lora": lora}), ("/lora-adapters", lora)):
        reply = http.post(path, body)
        assert (reply.status, problem in reply.error["message"]) == (400, True), reply.body
    assert http.post("/v1/completions", ASKED | {"model": "other"}).status == 404


def test_models_are_listed_with_their_parent(adapted):
    http = Http(adapted.url)
    models = http.get("/v1/models").json["data"]
    assert [(one["id"], one.get("parent")) for one in models] == [
        ("tiny", None),
        ("style", "tiny"),
        ("facts", "tiny"),
    ]
    assert len({one["x_zinc"]["fingerprint"] for one in models}) == 3
    assert http.get("/v1/models/facts").json["id"] == "facts"


OTHER_ROUTES: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 2}),
    "ollama": ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 2}}),
    "embeddings": ("/v1/embeddings", {"input": "hello"}),
    "score": ("/v1/score", {"input": "hello"}),
}


@pytest.mark.parametrize("route", OTHER_ROUTES)
def test_a_name_is_an_adapter_on_every_route(adapted, route):
    """Ollama's clients may end it with a tag."""
    path, body = OTHER_ROUTES[route]
    model = adapted.service.model
    for name in ("style", "style:latest"):
        said = post(adapted, path, body | {"model": name})
        assert said["system_fingerprint"] == model.for_request("style").fingerprint
    assert post(adapted, path, body | {"model": "tiny"})["system_fingerprint"] == model.fingerprint


def test_prefixes_are_found_by_the_same_adapters_alone(adapted):
    """The second request of each choice finds the pages that the first one left."""
    asked = ASKED | {"prompt": "a" * 64, "max_tokens": 1}
    for choice in ({"lora": [{"id": 0, "scale": 0.125}]}, {"lora": [{"id": 0, "scale": 0.25}]}):
        found = [
            post(adapted, "/v1/completions", asked | choice)["x_zinc"]["cached"]["tokens"]
            for _ in range(2)
        ]
        assert found[0] == 0
        assert found[1] >= 48


def test_a_replay_and_a_receipt_name_the_adapters(
    adapted, tiny_model_path, named, tmp_path, capsys, monkeypatch
):
    """With the adapters' files, in any order, the same bits; without one it is named."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    two = {"lora": [{"id": 0, "scale": 1.5}, {"id": 1, "scale": 0.5}]}
    request = CHAT | two | {"logits_digest": True}
    answer = post(adapted, "/v1/chat/completions", request)
    receipt = Http(adapted.url).get(f"/v1/receipts/{answer['id']}")
    files = [tmp_path / name for name in ("request.json", "response.json", "receipt.json")]
    for path, value in zip(files, (request, answer, receipt.json), strict=True):
        path.write_text(json.dumps(value))
    words = ["--model", str(tiny_model_path), "--tier", "cpu", "--context", "128", "--slots", "1"]
    both = [word for one in reversed(named) for word in ("--lora", str(one.path))]
    for given in (files[:2], files[2:]):
        assert main(["verify", *map(str, given), *words, *both]) == 0, capsys.readouterr()
        assert "identical" in capsys.readouterr().out
        assert main(["verify", *map(str, given), *words, *both[:2]]) == 1
        assert "adapter: " in capsys.readouterr().out
    lie = receipt.json
    lie["payload"]["model"]["adapters"][0]["scale"] += 0.25
    signed = signed_document(lie["payload"], lie["leaves"], open_key(tmp_path / "key"))
    files[2].write_text(json.dumps(signed))
    assert main(["verify", str(files[2]), *words, *both]) == 1
    assert "bits: choice 0: step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASKED | {"lora": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.25}]}),
        ("/v1/chat/completions", CHAT | {"model": "b", "seed": 3}),
        ("/v1/score", {"input": "hello", "model": "a"}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
def test_what_answers_of_a_file_named_twice_say_is_found_again(
    twice, tiny_model_path, named, tmp_path, capsys, path, body
):
    """Also of texts that are read, of an adapter by its name and of the defaults. A file that is
    named once too few is told."""
    http, name = Http(twice.url), str(named[0].path)
    answer = post(twice, path, body)
    receipt = http.get("/v1/receipts/latest").json
    files = [tmp_path / f"{part}.json" for part in ("request", "response", "receipt")]
    for file, value in zip(files, (body, answer, receipt), strict=True):
        file.write_text(json.dumps(value))
    words = ["--model", str(tiny_model_path), "--tier", "cpu", "--context", "128", "--slots", "1"]
    used = receipt["payload"]["model"]["adapters"]
    assert answer["x_zinc"]["lora"] == used
    for lora, code in ((f"a={name},b={name}", 0), (name, int(len(used) > 1))):
        for given in (files[:2], files[2:]):
            assert main(["verify", *map(str, given), *words, "--lora", lora]) == code
            assert ("adapter: " in capsys.readouterr().out) == bool(code)


def test_a_python_llm(tiny_model_path, named, truth):
    """All adapters with their scales by default; parameters name others, and a batch mixes them."""
    files = [f"{one.name}={one.path}:{one.scale}" for one in named]
    said = [None, {}, {"facts": 1.0}, {"style": 0.5}]
    parameters = [
        Parameters(max_tokens=6, ignore_end=True, lora=one)  # type: ignore[arg-type]
        for one in said
    ]
    with LLM(tiny_model_path, tier="cpu", slots=4, context=64, progress=False, lora=files) as llm:
        outputs = llm.generate([PROMPT] * 4, parameters)
        assert [list(one.tokens) for one in outputs[1:]] == [
            truth[()],
            truth[((1, 1.0),)],
            truth[((0, 0.5),)],
        ]
        assert list(outputs[0].tokens) not in truth.values()
        (wrong,) = llm.generate([PROMPT], Parameters(lora={"other": 1.0}))
        assert "names 'other'; the adapters here are style, facts" in str(wrong.error)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["style"], {"style": 200, "style:latest": 200}),
        (["facts", "style"], {"style": 200, "style:latest": 200, "facts": 200}),
        (["tiny"], dict.fromkeys(("none", "tiny", "style", "style:latest", "facts", "lora"), 200)),
        (["gone"], {}),
    ],
)
def test_who_may_use_an_adapter_alone_uses_no_other(serve, named, tmp_path, models, expected):
    """Not the model without it, and no list of adapters, whatever name is beside it; the name of
    the model opens all."""
    key = new_key()
    asked: dict[str, Json] = {
        name: {"model": name} for name in ("tiny", "style", "style:latest", "facts")
    }
    asked |= {"none": {}, "lora": {"model": "style", "lora": [{"id": 1, "scale": 1.0}]}}
    path = write_tenants(tmp_path, {"one": key}, one={"models": models})
    with serve(lora=named, tenants=path) as server:
        http = Http(server.url)
        for name, more in asked.items():
            for route in ("/v1/completions", "/completion"):
                body = (
                    ASKED | more if route[1] == "v" else {"prompt": PROMPT, "n_predict": 1} | more
                )
                reply = http.post(route, body, **bearer(key))
                assert reply.status == expected.get(name, 403), (name, route)
        listed = [one["id"] for one in http.get("/v1/models", **bearer(key)).json["data"]]
        assert set(listed) == expected.keys() & {"tiny", "style", "facts"}


def test_traces_are_refused(tiny_model_path, named, tmp_path):
    """They would not hold the adapters."""
    recording = Recording(tmp_path / "trace")
    options = SessionOptions(tier="cpu", context=64, lora=named, recording=recording)
    with pytest.raises(ConfigError, match="a trace holds no adapters"):
        Session.open(tiny_model_path, options)


@pytest.mark.usefixtures("unmeasured_steps")
def test_drafts_change_no_token(tiny_model_path, named):
    """Tokens that repeat a text are guessed, and the adapters' own answer decides."""
    answers = []
    for draft in (0, 5):
        options = SessionOptions(tier="cpu", context=128, lora=named[:1], draft=draft)
        with Session.open(tiny_model_path, options) as session:
            prompt = session.model.tokenizer.encode("one two three four " * 4)
            request = session.generate(prompt, SamplingParams(), 24)
            list(request)
            answers.append(request.sampled)
            drafted = session.engine.statistics.speculation.drafted
        assert (drafted > 0) == (draft > 0)
    assert answers[0] == answers[1]


def test_pages_on_disk_are_of_their_adapters_alone(serve, named, tmp_path):
    """After a restart the same adapters find them, no other scale and no request without."""
    asked = ASKED | {"prompt": "a" * 64, "max_tokens": 1}
    own = {"lora": [{"id": 0, "scale": 0.5}]}
    with serve(lora=named, disk_cache=tmp_path) as server:
        post(server, "/v1/completions", asked | own)
    with serve(lora=named, disk_cache=tmp_path) as server:
        for choice, found in (({}, 0), ({"lora": [{"id": 0, "scale": 1}]}, 0), (own, 48)):
            cached = post(server, "/v1/completions", asked | choice)["x_zinc"]["cached"]
            assert (cached["tokens"] >= found, cached.get("from_disk", 0) > 0) == (True, found > 0)
            assert found or cached["tokens"] == 0


def test_a_request_for_an_adapter_that_is_not_open(server):
    """A server without adapters has none of any number."""
    assert Http(server.url).get("/lora-adapters").json == []
    reply = Http(server.url).post("/v1/completions", ASKED | {"lora": [{"id": 0, "scale": 1}]})
    assert (reply.status, reply.error["param"]) == (400, "lora")
    assert Request(1, (1,), 1).adapters == ()


def test_the_fingerprint_is_that_of_the_server_everywhere(adapted, named, tiny_model_path, capsys):
    """Of ``run --json`` and of Python, without adapters and with one."""
    model = adapted.service.model
    for lora, scales in (((), ()), ((f"{named[0].path}:0.5",), ((0, 0.5),))):
        expected = model.with_adapters(scales).fingerprint
        words = ["run", "--json", "-n", "1", "hi", "--tier", "cpu", "-m", str(tiny_model_path)]
        assert main([*words, *(word for one in lora for word in ("--lora", one))]) == 0
        assert json.loads(capsys.readouterr().out)["system_fingerprint"] == expected
        with LLM(tiny_model_path, tier="cpu", lora=list(lora), progress=False) as llm:
            assert llm.system_fingerprint == expected
