"""``echo`` with ``logprobs``: how likely the tokens of a prompt are, by the definition, to the bit,
whatever was cached and whoever else asks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.types import Request
from harness.host.collectors import PromptScores
from harness.host.options import SessionOptions
from harness.host.session import Session
from reference.ops.log_probabilities import log_probabilities
from reference.sched.scores import TokenScores
from tests.serve.http import Http
from tests.serve.streams import data_of, lines_of

PROMPT = "the quick brown fox jumps over the lazy dog, and again the quick brown fox"
VOCAB = 320


def scored(http: Http, prompt: object, **more: object) -> Any:
    """The whole answer to a prompt and nothing after it."""
    body = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 0, "seed": 1, **more}
    return http.post("/v1/completions", body).answer


def logprobs(http: Http, prompt: object, **more: object) -> Any:
    return scored(http, prompt, **more)["choices"][0]["logprobs"]


def by_definition(path: Path, tokens: Sequence[int]) -> list[float]:
    """What rule R10 says of the logits of an engine that computes them all at once."""
    logits = np.empty((len(tokens), VOCAB), np.float32)
    options = SessionOptions(tier="cpu", context=128, all_logits=True, prefix_cache=False)
    with Session.open(path, options) as session:
        session.logits(tokens, logits)
    following = np.array(tokens[1:], np.int32)
    found: list[float] = log_probabilities(logits=logits[:-1], token=following, top=1)[0].tolist()
    return found


def test_the_values_are_those_of_the_definition(server, http, tiny_model_path):
    tokens = server.service.model.tokenizer.encode(PROMPT)
    told = logprobs(http, PROMPT)
    assert told["token_logprobs"] == [None, *by_definition(tiny_model_path, tokens)]
    assert "".join(told["tokens"]) == PROMPT
    assert told["top_logprobs"][0] is None
    for token, value, likeliest in list(
        zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    )[1:]:
        assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)
        assert 1 <= len(likeliest) <= 4
        assert likeliest[token] == value
    other = logprobs(http, PROMPT.replace("brown", "green"))
    assert other["token_logprobs"] != told["token_logprobs"]


def test_what_is_cached_changes_nothing(server, http):
    """Every logit is computed, though the prefix is known and was found for the request before."""
    first = scored(http, PROMPT)
    plain = {"prompt": PROMPT, "max_tokens": 1, "seed": 1}
    found = http.post("/v1/completions", plain).json["usage"]["prompt_tokens_details"]
    assert found["cached_tokens"] > 0
    again = scored(http, PROMPT)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == first["choices"]


def test_generated_tokens_are_as_likely_as_the_same_ones_given(http):
    """What an answer says of its tokens and what scoring says of them is one thing; and a greedy
    answer is the likeliest everywhere, as evaluation harnesses look at it."""
    greedy = {"max_tokens": 8, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    told = http.post("/v1/completions", {"prompt": [104, 105], "echo": True, **greedy}).json
    listed = told["choices"][0]["logprobs"]
    assert len(listed["tokens"]) == 10
    plain = http.post("/v1/completions", {"prompt": [104, 105], **greedy}).json
    for part, values in plain["choices"][0]["logprobs"].items():
        before = 2 if part == "text_offset" else 0
        assert listed[part][2:] == [value + before if before else value for value in values]
    for value, likeliest in list(
        zip(listed["token_logprobs"], listed["top_logprobs"], strict=True)
    )[2:]:
        assert value == max(likeliest.values())
    with pytest.raises(AssertionError):
        assert listed["token_logprobs"][1] == max(listed["top_logprobs"][1].values())


def test_an_end_is_a_token_too(server, http):
    """As many are listed as are counted, so that a prompt's are those before an answer's; a message
    has only those that say something."""
    (end, *_) = server.service.model.tokenizer.eog_ids
    forced = {"logit_bias": {str(end): 100}, "temperature": 0}
    told = scored(http, [104, 105], max_tokens=4, **forced)
    choice, usage = told["choices"][0], told["usage"]
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == (
        "hi",
        "stop",
        1,
    )
    assert len(choice["logprobs"]["token_logprobs"]) == usage["total_tokens"] == 3
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, **forced}
    message = http.post("/v1/chat/completions", chat).json["choices"][0]
    assert message["logprobs"]["content"] == []
    streamed = http.post("/v1/chat/completions", {**chat, "stream": True}).body
    choices = [choice for chunk in data_of(lines_of(streamed)) for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    assert not any(choice["logprobs"] for choice in choices)


def test_streams_choices_and_digests(client, http):
    """A stream says the same as a whole answer, of every choice; the digest is of what was sampled
    from, as without the prompt's tokens."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "seed": 5, "n": 2}
    prompts = [PROMPT, "abc"]
    extra = {"ignore_eos": True, "logits_digest": True}
    whole = client.completions.create(
        prompt=prompts, echo=True, logprobs=1, **asked, extra_body=extra
    )
    plain = client.completions.create(prompt=prompts, **asked, extra_body=extra)
    assert whole.x_zinc["logits_sha256"] == plain.x_zinc["logits_sha256"]  # type: ignore[attr-defined]
    values: list[list[float | None]] = [[] for _ in whole.choices]
    offsets: list[list[int]] = [[] for _ in whole.choices]
    texts = [""] * len(values)
    for chunk in client.completions.create(
        prompt=prompts, echo=True, logprobs=1, stream=True, **asked, extra_body=extra
    ):
        for choice in chunk.choices:
            assert choice.logprobs is not None
            values[choice.index] += choice.logprobs.token_logprobs or []
            offsets[choice.index] += choice.logprobs.text_offset or []
            texts[choice.index] += choice.text
    for number, choice in enumerate(whole.choices):
        assert choice.logprobs is not None
        assert (choice.logprobs.token_logprobs, choice.text) == (values[number], texts[number])
        assert choice.logprobs.text_offset == offsets[number]


def test_a_prompt_of_one_token_and_answers_of_none(http):
    told = scored(http, [104])["choices"][0]
    assert told["logprobs"]["token_logprobs"] == [None]
    assert (told["text"], told["finish_reason"]) == ("h", "length")
    nothing = http.post("/v1/completions", {"prompt": "abc", "max_tokens": 0}).json
    assert nothing["choices"][0]["text"] == ""
    assert nothing["usage"]["completion_tokens"] == 0
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    assert http.post("/v1/chat/completions", chat).error["param"] == "max_tokens"


def test_scores_that_come_again_are_taken_once():
    """As of a request that goes on elsewhere, after tokens of its answer."""
    request = Request(1, (5, 6, 7, 8), 4, score_from=1, score_top=2)
    logs = np.arange(6, dtype=np.float32)
    ids = np.arange(12, dtype=np.int32).reshape(6, 2)
    scores = PromptScores(request)
    for first, stop in ((1, 3), (1, 2), (2, 6)):
        part = slice(first, stop)
        scores(TokenScores(first, logs[part], ids[part], ids[part].astype(np.float32)))
    assert scores.complete
    assert [event.token for event in scores.tokens] == [5, 6, 7, 8]
    assert [event.log_probability for event in scores.tokens] == [None, 1.0, 2.0, 3.0]
    assert scores.tokens[3].top == ((6, 6.0), (7, 7.0))


def test_logits_that_are_not_finite_are_an_error(tmp_path, serve):
    """A model that fails is no list of numbers that are none."""
    with serve(slots=1) as server:
        runner = server.service.model.driver.call(lambda engine: engine.runner)
        collected = runner.collect

        def broken(submission: Any) -> Any:
            output = collected(submission)
            return replace(output, token=np.full_like(output.token, -1))

        runner.collect = broken  # type: ignore[method-assign]
        body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
        reply = Http(server.url).post("/v1/completions", body)
    assert (reply.status, reply.error["code"]) == (500, "model_failed")
