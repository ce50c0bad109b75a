"""llama.cpp's own routes: the completions of ``/v1/completions`` in its words."""

import json
from typing import Any

import pytest

from harness.serve.routes import adds_bos
from harness.serve.wire import TokenizeRequest
from tests.serve.http import Http
from tests.tables import table

Json = dict[str, Any]
ASKED: Json = {"prompt": "The sky is", "n_predict": 12, "seed": 5, "ignore_eos": True}


def completed(http: Http, **more: Any) -> Json:
    """The choice of the same completion by OpenAI's route."""
    choice: Json = http.post("/v1/completions", ASKED | more).answer["choices"][0]
    return choice


def continued(http: Http, **more: Any) -> Json:
    return http.post("/completion", ASKED | more).answer


def test_it_is_the_completion_of_the_other_route(http):
    told = continued(http, return_tokens=True)
    same = completed(http, return_token_ids=True)
    assert told["content"] == same["text"]
    assert told["tokens"] == same["token_ids"]
    assert told["prompt"] == "The sky is"
    assert (told["tokens_predicted"], told["stop"], told["stop_type"]) == (12, True, "limit")
    assert told["generation_settings"]["seed"] == 5
    assert told["timings"]["predicted_n"] == 12
    assert told["timings"]["cache_n"] == told["tokens_cached"]


def test_a_stream_has_the_same_text_and_tokens(http):
    whole = continued(http, return_tokens=True, n_probs=2)
    body = ASKED | {"return_tokens": True, "n_probs": 2, "stream": True}
    lines = http.post("/completion", body).body.decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    for name in ("tokens", "completion_probabilities"):
        assert [one for chunk in chunks for one in chunk.get(name, ())] == whole[name]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_probabilities_are_those_of_the_other_route(http):
    told = continued(http, n_probs=3, return_tokens=True)["completion_probabilities"]
    listed = completed(http, logprobs=3)["logprobs"]
    assert [one["logprob"] for one in told] == listed["token_logprobs"]
    assert [one["token"] for one in told] == listed["tokens"]
    assert all(len(one["top_logprobs"]) == 3 for one in told)
    assert "completion_probabilities" not in continued(http)


@pytest.mark.parametrize("prompt", [[84, "he sky"], ["The sky"], [[84, 104, 101]], [84, 104]])
def test_prompts_of_ids_and_texts(http, server, prompt):
    tokenizer = server.service.model.tokenizer
    parts = prompt[0] if isinstance(prompt[0], list) else prompt
    ids: list[int] = []
    for number, part in enumerate(parts):
        own = None if number == 0 else False
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_bos=own)
    assert continued(http, prompt=prompt)["content"] == completed(http, prompt=ids)["text"]


def test_how_an_answer_ended(http):
    text = continued(http)["content"]
    word = continued(http, stop=[text[3]])
    assert (word["stop_type"], word["stopping_word"]) == ("word", text[3])
    assert word["content"] == text[: text.index(text[3])]


def test_biases_in_each_of_its_forms(http):
    first = continued(http, return_tokens=True)["tokens"][0]
    forbidden = continued(http, return_tokens=True, logit_bias=[[first, False]])
    assert forbidden["tokens"][0] != first
    forms: tuple[Any, ...] = ([[70, 100.0]], {"70": 100.0}, [["F", 100.0]])
    for form in forms:
        assert continued(http, return_tokens=True, logit_bias=form)["tokens"] == [70] * 12
    assert http.post("/completion", ASKED | {"logit_bias": [[70, True]]}).status == 400


def test_grammars_and_schemas(http):
    asked = {"ignore_eos": False, "n_predict": 60, "json_schema": {"enum": [1, 2]}}
    assert json.loads(continued(http, **asked)["content"]) in (1, 2)
    assert continued(http, ignore_eos=False, grammar='root ::= "yes"')["content"] == "yes"


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_a_seed_that_is_drawn(http, seed):
    seeds = {continued(http, seed=seed)["generation_settings"]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_minus_one_looks_back_as_far_as_the_server_does(http):
    asked = {"repeat_penalty": 1.8, "n_predict": 30}
    far = continued(http, repeat_last_n=-1, **asked)
    assert far["content"] == continued(http, **asked)["content"]
    assert far["content"] != continued(http, repeat_last_n=1, **asked)["content"]


def test_what_it_says_of_the_model(http, server):
    told = http.get("/props").json
    model = server.service.model
    assert told["default_generation_settings"]["n_ctx"] == model.context
    assert told["total_slots"] == model.driver.statistics.slots
    assert told["chat_template"] == model.template.text if model.template else ""


def test_tokens_by_its_names(http):
    by_prompt = http.post("/tokenize", {"prompt": "Hé", "add_special_tokens": False}).json
    assert http.post("/tokenize", {"content": "Hé"}).json["tokens"] == by_prompt["tokens"]
    pieces = http.post("/tokenize", {"content": "Hé", "with_pieces": True}).json["tokens"]
    assert [one["id"] for one in pieces] == by_prompt["tokens"]
    assert pieces[0]["piece"] == "H"
    said = [one["piece"] for one in pieces]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in said).decode() == "Hé"
    assert http.post("/detokenize", {"tokens": by_prompt["tokens"]}).json["content"] == "Hé"
    assert http.post("/tokenize", {"content": "a", "prompt": "a"}).status == 400


@pytest.mark.parametrize(
    ("body", "adds"),
    [
        ({"prompt": "a"}, True),
        ({"content": "a"}, False),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"content": "a", "add_special": True}, True),
    ],
)
def test_whether_a_bos_goes_in_front(body, adds):
    assert adds_bos(TokenizeRequest(**body)) is adds


@pytest.mark.parametrize(
    ("path", "body"), table(__file__, "test_llama_cpp")["minus_one_is_no_seed_of_any_route"]
)
def test_minus_one_is_no_seed_of_any_route(http, path, body):
    """Another negative number is one."""
    drawn = [http.post(path, body | {"seed": -1}).json["x_zinc"]["seed"] for _ in range(2)]
    assert 0 <= min(drawn) < max(drawn) < 2**53
    assert http.post(path, body | {"seed": -2}).json["x_zinc"]["seed"] == 2**64 - 2
