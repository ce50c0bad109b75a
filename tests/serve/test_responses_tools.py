"""``/v1/responses`` with tools and formats, on a model that speaks as a real family does."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from harness.serve.responses.namespaces import LONGEST_NAME, joined_name, out_of_namespaces
from harness.serve.wire_tools import MAX_TOOLS
from tests.serve.calling import WEATHER, Weather, check_call, client_of

TOOL = {"type": "function", "strict": True, **WEATHER}
ASKED: dict[str, Any] = {
    "model": "tiny", "input": "How warm is it?", "max_output_tokens": 150,
    "reasoning": {"effort": "none"}, "extra_body": {"seed": 1},
}  # fmt: skip
CALLING = {**ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
def client(hermes) -> Iterator[OpenAI]:
    with client_of(hermes) as openai_client:
        yield openai_client


def test_a_call_is_an_item_streamed_or_not(client):
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


def test_what_a_function_gave_goes_back(client):
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


@pytest.mark.parametrize("name", ["mcp__w", "mcp__w__", "an.agent", "n" * 80])
def test_functions_of_a_namespace_are_called(client, name):
    """As Codex offers those of MCP servers: a call says which one's it is, streamed or not, and
    goes back as it is."""
    space = {"type": "namespace", "name": name, "tools": [TOOL, {"type": "custom", "name": "c"}]}
    asked = {**CALLING, "tools": [space, {**TOOL, "name": "other"}]}
    for seed in range(20):
        answer = client.responses.create(**{**asked, "extra_body": {"seed": seed}})
        (call,) = answer.output
        assert call.type == "function_call"
        if call.name != "other":
            break
    assert call.model_dump()["namespace"] == name
    check_call(call.name, call.arguments)
    assert answer.model_dump()["x_zinc"]["ignored"] == [f"{name[:64]}.c (custom)"]
    with client.responses.stream(**{**asked, "extra_body": {"seed": seed}}) as stream:
        events = [event.model_dump() for event in stream]
    items = [event["item"] for event in events if "item" in event]
    items += events[-1]["response"]["output"]
    assert len(items) == 3
    assert {(one["name"], one["namespace"]) for one in items} == {(call.name, name)}
    turns = [
        {"role": "user", "content": "How warm is it?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"},
    ]
    again = client.responses.create(**{**asked, "input": turns, "tool_choice": "none"})
    assert [item.type for item in again.output] == ["message"]


def test_names_of_functions_of_namespaces_are_distinct():
    """And short enough, though some differ in characters that are left out alone."""
    spaces = ["n", "n" * 80, "n" * 80 + "m", "an.agent", "an agent"]
    names = {joined_name(space, name) for space in spaces for name in ("f", "g" * 64, "f.g", "f g")}
    assert len(names) == 4 * len(spaces)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]+", n) and len(n) <= LONGEST_NAME for n in names)
    assert joined_name(None, "f") == "f"


def test_more_functions_of_namespaces_than_there_may_be_are_left_out():
    many = [{**TOOL, "name": f"f{number}"} for number in range(200)]
    ignored: list[str] = []
    space = {"type": "namespace", "name": "n", "tools": many}
    tools = out_of_namespaces({"tools": [space, TOOL]}, ignored)["tools"]
    assert (len(tools), tools[-1], tools[0]["namespace"]) == (MAX_TOOLS, TOOL, "n")
    assert ignored == [f"n.f{number} (function)" for number in range(MAX_TOOLS - 1, 200)]


def test_a_format_is_enforced(client):
    parsed = client.responses.parse(**ASKED, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    form = {"type": "json_object"}
    text = client.responses.create(**{**ASKED, "text": {"format": form}}).output_text
    assert isinstance(json.loads(text), dict)


def test_what_cannot_be_enforced_is_refused_under_its_name_here(client):
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**ASKED, "text": {"format": form}})
    assert str(refused.value.param).startswith("text.format")
