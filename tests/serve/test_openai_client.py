"""OpenAI's own client against the routes it knows: what it reads is what the engine computed."""

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
SAMPLED = {"model": "tiny", "messages": MESSAGES, "seed": 11, "max_tokens": 12}


def test_a_stream_says_what_the_whole_answer_says(client):
    """Text, finish reason and usage, for two choices of one request."""
    whole = client.chat.completions.create(**SAMPLED, n=2)
    texts, finishes = ["", ""], [None, None]
    usage = None
    for chunk in client.chat.completions.create(
        **SAMPLED, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        assert chunk.system_fingerprint == whole.system_fingerprint
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == whole.usage.total_tokens


def test_a_seed_that_was_drawn_is_named_and_reproduces_the_answer(client):
    drawn = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    assert drawn.model_extra is not None
    seed = drawn.model_extra["x_zinc"]["seed"]
    again = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, seed=seed
    )
    other = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, seed=seed + 1
    )
    assert again.choices[0].message.content == drawn.choices[0].message.content
    assert other.choices[0].message.content != drawn.choices[0].message.content


def test_log_probabilities_come_with_every_token(client):
    """Greedy: the token is the first of the likeliest in its place, and streamed ones are equal."""
    asked = {**SAMPLED, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.bytes == entry.top_logprobs[0].bytes
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_listed_tokens_of_a_text_have_the_one_that_was_taken(client):
    """Also where it is none of the likeliest: then there is one more."""
    for listed in (0, 1, 3):
        answer = client.completions.create(
            model="tiny", prompt="abc", max_tokens=24, temperature=2, seed=5, logprobs=listed
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        told = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)  # type: ignore[arg-type, call-overload]
        more = 0
        for token, value, top in told:
            # Of several tokens with one text, as parts of characters have, the likeliest counts.
            assert top[token] == value or (token in ("", "�") and top[token] > value)
            assert len(top) <= listed + 1
            more += len(top) == listed + 1
        assert more


def test_a_bias_decides_a_token(client):
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=3, temperature=0, logit_bias={"65": 100}
    )
    text = client.completions.create(model="tiny", prompt="abc", max_tokens=3, temperature=0)
    assert len(set(answer.choices[0].text)) == 1
    assert answer.choices[0].text != text.choices[0].text


def test_a_stop_string_ends_the_text_before_it(client):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 24, "seed": 3}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[3:5]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_errors_arrive_as_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**SAMPLED, "model": "gpt-9"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**SAMPLED, "temperature": 1e9})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="abc " * 500)
    assert long.value.code == "context_length_exceeded"


def test_fields_not_served_are_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**SAMPLED, modalities=["audio"])
    assert refused.value.param == "modalities"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**SAMPLED, extra_body={"top_q": 1})
    assert (refused.value.param, refused.value.code) == ("top_q", "unknown_parameter")


@pytest.mark.parametrize(
    ("asked", "served"),
    [("priority", "default"), ("auto", "default"), ("default", "default"), ("flex", "flex")],
)
def test_the_service_tier_is_the_tenants_or_lower(client, asked, served):
    """The answer names the class that served it."""
    answer = client.chat.completions.create(**SAMPLED, service_tier=asked)
    assert answer.service_tier == served


def test_an_echoed_prompt_comes_before_its_answer(client):
    """Of every choice, streamed or not, given as text or as ids."""
    asked = {
        "model": "tiny", "max_tokens": 6, "seed": 5, "n": 2, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    for prompts in (["hello ", "abc"], [[104, 105], [97, 98, 99]]):
        texts = ["hello ", "abc"] if isinstance(prompts[0], str) else ["hi", "abc"]
        plain = client.completions.create(prompt=prompts, **asked).choices
        echoed = client.completions.create(prompt=prompts, echo=True, **asked).choices
        requested = [texts[index // 2] + choice.text for index, choice in enumerate(plain)]
        assert [choice.text for choice in echoed] == requested
        streamed = [""] * 4
        for chunk in client.completions.create(prompt=prompts, echo=True, stream=True, **asked):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == requested


def test_what_completions_do_not_do_is_refused(client):
    for field, value in (("suffix", "end"), ("best_of", 2)):
        with pytest.raises(openai.BadRequestError, match=field):
            client.completions.create(model="tiny", prompt="a", **{field: value})
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 2, "best_of": 2}
    assert len(client.completions.create(n=2, **asked).choices) == 2
