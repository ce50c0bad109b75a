"""Text between a prefix and a suffix: by completions, llama.cpp's route and Ollama's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from harness.serve.run import Running
from reference.model.tokenizer import load_tokenizer
from tests.model.tokenizer_data import byte_level_metadata, shared_tokenizer
from tests.serve.calling import client_of
from tests.serve.http import Http
from tests.serve.speaking_models import templated_model

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))<|im_end|>"


@pytest.fixture(scope="module")
def coder(serve, tmp_path_factory) -> Iterator[Running]:
    """A server of a model with the marks of Qwen's coders."""
    folder = tmp_path_factory.mktemp("coder")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serve(path=templated_model(folder, "coder", template, MARKS)) as server:
        yield server


def ids_of(server: Running, *parts: str) -> list[int]:
    """Marks as tokens, other texts without control tokens."""
    tokenizer = server.service.model.tokenizer
    return [
        token
        for part in parts
        for token in tokenizer.encode(part, parse_special=part in MARKS, add_bos=False)
    ]


def test_a_completion_with_a_suffix(coder):
    """The tokens of the texts after their marks; the end of a turn in a file is its text."""
    http = Http(coder.url)
    body = {"prompt": PREFIX, "max_tokens": 6, "seed": 2, "return_token_ids": True}
    told = http.post("/v1/completions", body | {"suffix": SUFFIX}).json["choices"][0]
    pre, suf, mid, _ = MARKS
    expected = ids_of(coder, pre, PREFIX, suf, SUFFIX, mid)
    assert told["prompt_token_ids"] == expected
    same = http.post("/v1/completions", body | {"prompt": expected}).json["choices"][0]
    assert told["text"] == same["text"]
    none = http.post("/v1/completions", body | {"suffix": ""}).json["choices"][0]
    assert none["prompt_token_ids"] == ids_of(coder, PREFIX)


def test_llama_cpps_route(coder):
    """Its answer is the same completion, whole or streamed; other files come first."""
    http = Http(coder.url)
    more = {"seed": 2, "n_predict": 6}
    text = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 6, "seed": 2}
    completed = http.post("/v1/completions", text).json
    body = {"input_prefix": PREFIX[:5], "prompt": PREFIX[5:], "input_suffix": SUFFIX, **more}
    told = http.post("/infill", body).json
    assert told["content"] == completed["choices"][0]["text"]
    assert told["tokens_evaluated"] == completed["usage"]["prompt_tokens"]
    assert (told["stop"], told["stop_type"]) == (True, "limit")
    lines = http.post("/infill", body | {"stream": True}).body.decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(chunk["content"] for chunk in chunks) == told["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    extra = {"input_extra": [{"filename": "a.py", "text": "x = 1\n"}]}
    with_file = http.post("/infill", body | extra).json
    file = ids_of(coder, MARKS[3], "a.py\nx = 1\n", MARKS[3], "filename\n")
    assert with_file["tokens_evaluated"] == told["tokens_evaluated"] + len(file)


def test_clients_of_other_apis(coder):
    client: OpenAI = client_of(coder)
    seed: dict[str, Any] = {"seed": 2, "max_tokens": 6}
    told = client.completions.create(model="tiny", prompt=PREFIX, suffix=SUFFIX, **seed)
    body = {"model": "tiny", "prompt": PREFIX, "suffix": SUFFIX, "stream": False}
    options = {"options": {"seed": 2, "num_predict": 6}}
    ollama = Http(coder.url).post("/api/generate", body | options).json
    assert ollama["response"] == told.choices[0].text


def test_what_is_refused(coder, http):
    """A model without the marks, prompts that are tokens, and a prompt in front of the answer."""
    own = Http(coder.url)
    for more in ({"prompt": [1, 2]}, {"prompt": "a", "echo": True}, {"prompt": [[1], [2]]}):
        refused = own.post("/v1/completions", {"suffix": "b", **more})
        assert (refused.status, refused.error["param"]) == (400, "suffix")
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ):
        refused = http.post(path, body)
        assert (refused.status, refused.error["param"]) == (400, param)
    assert own.post("/infill", {"input_prefix": "a", "input_suffix": "b", "n": 2}).status == 400


def test_a_file_may_name_the_marks_by_id():
    """Then their texts say nothing; where one of three is missing there are none."""
    names = ("fim_pre", "fim_suf", "fim_mid")
    keys = byte_level_metadata([], ["<a>", "<b>", "<c>", *MARKS[:3]])
    named = {f"tokenizer.ggml.{name}_token_id": 256 + n for n, name in enumerate(names)}
    assert load_tokenizer(keys, "test").infill_ids == (259, 260, 261, None)
    assert load_tokenizer(keys | named, "test").infill_ids == (256, 257, 258, None)
    without = byte_level_metadata([], list(MARKS[:2]))
    assert load_tokenizer(without, "test").infill_ids is None
    assert shared_tokenizer("gemma-4").infill_ids is None
