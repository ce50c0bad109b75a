"""Tools and thoughts with OpenAI's own client, on models that speak as real families do."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from harness.serve.run import Running
from harness.serve.transcripts import read_answer
from harness.serve.verify import first_difference
from tests.serve.calling import (
    ASKED,
    CALLING,
    ENUM,
    MESSAGES,
    TIME,
    TOOLS,
    UNTHINKING,
    check_call,
    client_of,
    token_of,
)
from tests.serve.http import Http
from tests.serve.speaking_models import CONTEXT, MARKS, speaking_model


@pytest.fixture(scope="module", params=MARKS)
def any_server(request, serve, tmp_path_factory) -> Iterator[Running]:
    """A server for each family."""
    path = speaking_model(tmp_path_factory.mktemp("speaking"), request.param)
    with serve(path=path, context=CONTEXT) as running:
        yield running


@pytest.fixture
def any_client(any_server) -> Iterator[OpenAI]:
    with client_of(any_server) as client:
        yield client


@pytest.fixture
def client(hermes) -> Iterator[OpenAI]:
    with client_of(hermes) as client:
        yield client


def accumulated(stream: Any) -> tuple[str, str, list[list[str]], str | None]:
    """Content, thoughts, calls as [id, name, arguments], and how it ended, as clients add up."""
    content = reasoning = ""
    calls: list[list[str]] = []
    finish = None
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls)
                    assert call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments or ""
    return content, reasoning, calls, finish


def test_a_required_call_is_made_in_the_models_own_way(any_client):
    """Whatever the family writes, the client gets a call that obeys its schema; and the stream
    says what the whole answer says."""
    asked = {**CALLING, "seed": 1, "extra_body": UNTHINKING}
    choice = any_client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    streamed = accumulated(any_client.chat.completions.create(**asked, stream=True))
    told = [call.id, call.function.name, call.function.arguments]
    assert streamed == ("", "", [told], "tool_calls")


def test_a_call_and_its_answer_go_back_into_the_conversation(any_client):
    """The message as the client has it, and the template shows the model both."""
    asked = {**CALLING, "seed": 1, "extra_body": UNTHINKING}
    message = any_client.chat.completions.create(**asked).choices[0].message
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunshine"}
    again = any_client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, message, answer], tools=TOOLS, max_tokens=3, seed=1
    )
    alone = any_client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
    assert again.usage.prompt_tokens > alone.usage.prompt_tokens
    http = Http(str(any_client.base_url).removesuffix("/v1/"))
    turns = [*MESSAGES, message.model_dump(exclude_unset=True), answer]
    prompt = http.post("/apply-template", {"messages": turns, "tools": TOOLS}).json["prompt"]
    assert "sunshine" in prompt
    assert message.tool_calls[0].function.name in prompt.split("How warm")[1]


def test_thoughts_are_told_apart(any_server, any_client):
    """A format holds for what comes after them; tokens of thoughts are counted as such."""
    reasoning = any_server.service.model.dialect.reasoning
    assert reasoning is not None
    begin = reasoning.open.removesuffix("thought")
    begins, closes = (8, 6) if begin == "<|channel>" else (6, 8)
    asked = {
        **ASKED, "seed": 0, "reasoning_effort": "high",
        "logit_bias": {
            token_of(any_server, begin): begins, token_of(any_server, reasoning.close): closes,
        },
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ENUM}},
    }  # fmt: skip
    answer = any_client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert json.loads(message.content) in ENUM["enum"]
    reasoning = message.model_extra["reasoning_content"]
    assert reasoning
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < answer.usage.completion_tokens
    streamed = accumulated(any_client.chat.completions.create(**asked, stream=True))
    assert streamed == (message.content, reasoning, [], "stop")
    silent = any_client.chat.completions.create(**{**asked, "reasoning_effort": "none"})
    assert "reasoning_content" not in (silent.choices[0].message.model_extra or {})
    assert silent.usage.completion_tokens_details.reasoning_tokens == 0


def test_several_calls_only_where_they_may_be(client):
    """The same seed makes more than one call with ``parallel_tool_calls``, and one without."""
    asked = {**CALLING, "max_tokens": 120, "extra_body": UNTHINKING}
    asked["tools"] = [{"type": "function", "function": TIME}]
    for seed in range(8):
        several = {**asked, "parallel_tool_calls": True, "seed": seed}
        calls = client.chat.completions.create(**several).choices[0].message.tool_calls
        if len(calls) > 1:
            break
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    (one,) = client.chat.completions.create(**asked, seed=seed).choices[0].message.tool_calls
    assert one == calls[0]


def test_strict_tools_are_enforced_where_the_model_decides(hermes, client):
    """A bias makes it begin calls: strict ones are whole, others are the text they are."""
    bias = {token_of(hermes, "<tool_call>"): 7}
    strict = [{"type": "function", "function": {**TIME, "strict": True}}]
    asked = {**ASKED, "max_tokens": 80, "logit_bias": bias, "seed": 1, "extra_body": UNTHINKING}
    enforced = client.chat.completions.create(**asked, tools=strict).choices[0]
    # The limit may have cut the last one.
    first, *_ = enforced.message.tool_calls
    check_call(first.function.name, first.function.arguments)
    streamed = accumulated(client.chat.completions.create(**asked, tools=strict, stream=True))
    assert [call[2] for call in streamed[2]] == [
        call.function.arguments for call in enforced.message.tool_calls
    ]
    assert streamed[0] == enforced.message.content
    free = client.chat.completions.create(**asked, tools=TOOLS).choices[0]
    assert free.message.tool_calls is None
    assert "<tool_call>" in free.message.content


def test_without_a_choice_tools_are_not_even_shown(client):
    asked = {**ASKED, "max_tokens": 4, "seed": 1}
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    alone = client.chat.completions.create(**asked)
    auto = client.chat.completions.create(**asked, tools=TOOLS)
    assert none.choices[0].message == alone.choices[0].message
    assert none.usage.prompt_tokens == alone.usage.prompt_tokens < auto.usage.prompt_tokens


def test_streamed_calls_are_replayed(hermes, tmp_path):
    """Of chat completions and responses, as clients received them."""
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    other = {"input": "How warm is it?", "tools": tools, "tool_choice": "required", "seed": 3}
    file = tmp_path / "answer.txt"
    for path, body in (
        ("/v1/chat/completions", {**CALLING, **UNTHINKING, "parallel_tool_calls": True, "seed": 3}),
        ("/v1/responses", {**other, "max_output_tokens": 150, "reasoning": {"effort": "none"}}),
    ):
        streamed = Http(hermes.url).post(path, {**body, "stream": True}).body
        file.write_bytes(streamed)
        assert first_difference(hermes.service.model, body, read_answer(file)) is None
        assert b"arguments" in streamed
        assert first_difference(hermes.service.model, {**body, "seed": 4}, read_answer(file))
