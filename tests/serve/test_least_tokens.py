"""Answers of a least number of tokens: ``min_tokens`` of vLLM, and ``ignore_eos``."""

from typing import Any

import pytest

from contract.types import Request
from harness.host.remote.work import Work
from tests.serve.http import Http

A = 65
PATHS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 12},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12},
    "/completion": {"prompt": "hello", "n_predict": 12},
}
LEAST = 5


def tokens_of(http: Http, path: str, **more: Any) -> tuple[list[int], str, str]:
    """The tokens of an answer, its text, and how it ended."""
    asked = {**PATHS[path], "seed": 3, "return_token_ids": True, "return_tokens": True, **more}
    answer = http.post(path, asked).answer
    if path == "/completion":
        return answer["tokens"], answer["content"], answer["stop_type"]
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return choice["token_ids"], text, choice["finish_reason"]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_ends_an_answer_before_its_least_number_of_tokens(hermes, path):
    http = Http(hermes.url)
    end = min(hermes.service.model.tokenizer.eog_ids)
    eager = {"logit_bias": {str(end): 100.0}}
    assert len(tokens_of(http, path, **eager)[0]) <= 1, "it ends at once otherwise"
    tokens, _, why = tokens_of(http, path, **eager, min_tokens=LEAST)
    said = [token for token in tokens if token != end]
    assert len(said) == LEAST
    assert why in ("stop", "eos")
    assert tokens_of(http, path, **eager, ignore_eos=True)[0] == [end] * 12

    always = {"logit_bias": {str(A): 100.0}, "min_tokens": LEAST}
    _, text, why = tokens_of(http, path, **always, stop=["A"])
    assert (text, why) == ("A" * LEAST, "word" if path == "/completion" else "stop")
    tokens, text, _ = tokens_of(http, path, **always, stop_token_ids=[A])
    assert A not in tokens[:LEAST]
    assert "A" not in text


def test_a_format_that_allows_nothing_else_ends_the_answer(hermes):
    more = {"guided_regex": "ab", "min_tokens": 8}
    tokens, text, why = tokens_of(Http(hermes.url), "/v1/completions", **more)
    assert (text, why) == ("ab", "stop")
    assert len(tokens) < 8


def test_a_replica_goes_on_with_what_is_left():
    request = Request(1, (1, 2), 9, min_tokens=4, stop_tokens=(7,))
    assert [Work(request, tuple(range(n))).left.min_tokens for n in (0, 3, 6)] == [4, 1, 0]
