"""``/v1/responses`` with tools and formats, on a model that speaks as a real family does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from harness.serve.run import Running
from tests.serve.calling import WEATHER, Weather, check_call, client_of

TOOL = {"type": "function", "strict": True, **WEATHER}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "How warm is it?",
    "max_output_tokens": 150,
    "reasoning": {"effort": "none"},
    "extra_body": {"seed": 1},
}
CALLING = {**ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
def client(hermes: Running) -> Iterator[OpenAI]:
    with client_of(hermes) as openai_client:
        yield openai_client


def test_a_call_is_an_item_streamed_or_not(client: OpenAI) -> None:
    """And its arguments obey the schema of the function."""
    answer = client.responses.create(**CALLING)
    (call,) = answer.output
    assert call.type == "function_call"
    check_call(call.name, call.arguments)
    with client.responses.stream(**CALLING) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert streamed.call_id == call.call_id


def test_what_a_function_gave_goes_back(client: OpenAI) -> None:
    (call,) = client.responses.create(**CALLING).output
    assert call.type == "function_call"
    turns = [
        {"role": "user", "content": ASKED["input"]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"},
    ]
    again = client.responses.create(**{**CALLING, "input": turns, "tool_choice": "none"})
    assert [item.type for item in again.output] == ["message"]
    assert again.usage is not None
    alone = client.responses.create(**{**CALLING, "tool_choice": "none"})
    assert alone.usage is not None
    assert again.usage.input_tokens > alone.usage.input_tokens + len("12 degrees")


def test_a_format_is_enforced(client: OpenAI) -> None:
    parsed = client.responses.parse(**ASKED, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    form = {"type": "json_object"}
    text = client.responses.create(**{**ASKED, "text": {"format": form}}).output_text
    assert isinstance(json.loads(text), dict)


def test_what_cannot_be_enforced_is_refused_under_its_name_here(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**ASKED, "text": {"format": form}})
    assert str(refused.value.param).startswith("text.format")
