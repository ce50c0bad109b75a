"""``POST /v1/score`` and ``prompt_logprobs``: the numbers of ``echo``, in other words."""

import math
from typing import Any

from tests.serve.http import Http

PROMPT = "the quick brown fox jumps over the lazy dog"
TURN = [{"role": "user", "content": "Hello"}]


def scored(http: Http, **body: Any) -> Any:
    return http.post("/v1/score", body).answer


def echoed(http: Http, prompt: object) -> Any:
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    return http.post("/v1/completions", body).json["choices"][0]["logprobs"]


def test_scores_are_those_of_echo(server, http):
    """A text, several, ids, and starts of their own; the tenant pays for the tokens."""
    before = http.get("/v1/tenants/local/usage").json["total"]["prompt_tokens"]
    (one,) = scored(http, input=PROMPT, top=2)["data"]
    expected = echoed(http, PROMPT)
    tokens = server.service.model.tokenizer.encode(PROMPT)
    assert one["tokens"] == tokens
    assert one["logprobs"] == expected["token_logprobs"]
    assert one["sum"] == math.fsum(one["logprobs"][1:])
    assert one["top_logprobs"][0] is None
    for token, rank, top in list(zip(tokens, one["ranks"], one["top_logprobs"], strict=True))[1:]:
        ids = [likely["id"] for likely in top]
        assert len(ids) == 2
        assert rank == (ids.index(token) + 1 if token in ids else None)
    texts = [PROMPT[: 9 + number] for number in range(7)]
    several = scored(http, input=texts, start=[1 + number for number in range(7)])
    for number, (text, found) in enumerate(zip(texts, several["data"], strict=True)):
        whole = echoed(http, text)["token_logprobs"]
        assert found["index"] == number
        assert found["logprobs"][number + 1 :] == whole[number + 1 :]
        assert found["logprobs"][: number + 1] == [None] * (number + 1)
        assert found["top_logprobs"][-1] == []
    assert scored(http, input=[tokens], top=2)["data"][0] == one
    used = http.get("/v1/tenants/local/usage").json["total"]["prompt_tokens"]
    assert used - before >= 2 * len(tokens) + several["usage"]["prompt_tokens"]


def test_one_token_has_no_score(http):
    (found,) = scored(http, input=[5])["data"]
    assert (found["logprobs"], found["sum"]) == ([None], 0.0)


def test_prompt_logprobs_of_texts_and_conversations(server, http):
    """As vLLM has them; the answer itself is the one without them."""
    asked = {"prompt": PROMPT, "max_tokens": 4, "seed": 3, "ignore_eos": True}
    plain = http.post("/v1/completions", asked).json["choices"][0]
    (choice,) = http.post("/v1/completions", {**asked, "prompt_logprobs": 2}).json["choices"]
    listed = choice.pop("prompt_logprobs")
    assert choice == plain
    tokens = server.service.model.tokenizer.encode(PROMPT)
    expected = echoed(http, PROMPT)
    assert listed[0] is None
    for token, position, value in zip(
        tokens[1:], listed[1:], expected["token_logprobs"][1:], strict=True
    ):
        assert position[str(token)]["logprob"] == value
        assert 2 <= len(position) <= 3
        ranks = [one["rank"] for one in position.values() if one["rank"]]
        assert sorted(ranks) == [1, 2]
    chat = {"messages": TURN, "max_tokens": 3, "prompt_logprobs": 0, "return_token_ids": True}
    whole = http.post("/v1/chat/completions", chat).json
    ids = whole["prompt_token_ids"]
    values = [next(iter(position)) for position in whole["prompt_logprobs"][1:]]
    assert values == list(map(str, ids[1:]))
    echo = {**asked, "echo": True, "logprobs": 2, "prompt_logprobs": 2}
    assert http.post("/v1/completions", echo).json["choices"][0]["prompt_logprobs"] == listed
    different = {**echo, "prompt_logprobs": 1}
    assert http.post("/v1/completions", different).error["param"] == "prompt_logprobs"
    stream = {**asked, "prompt_logprobs": 1, "stream": True}
    assert http.post("/v1/completions", stream).error["param"] == "prompt_logprobs"


def test_prompts_that_begin_alike_are_read_once(serve):
    with serve(slots=2) as server:
        http = Http(server.url)
        tokens = [(number * 7) % 250 for number in range(60)]
        first = scored(http, input=[tokens], start=55)["data"]
        hits = server.service.model.driver.call(lambda engine: engine.statistics.prefix.tokens_hit)
        again = scored(http, input=[tokens], start=55)["data"]
        now = server.service.model.driver.call(lambda engine: engine.statistics.prefix.tokens_hit)
    assert again == first
    assert now - hits >= 48
