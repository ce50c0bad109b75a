"""Schemas that no grammar holds exactly: every route answers 400 and names the keyword."""

import json
from typing import Any

import pytest

from harness.serve.run import Running
from tests.serve.http import JSON, Http, Reply

TURNS = {"messages": [{"role": "user", "content": "Hello"}]}
LARGE = 2**53 + 1
INEXACT: dict[str, dict[str, Any]] = {
    "const": {"const": 1234567890123456789},
    "enum": {"enum": [1, {"b": [2**64]}]},
    "minimum": {"type": "integer", "minimum": 18446744073709551615},
    "exclusiveMaximum": {"type": "integer", "exclusiveMaximum": -LARGE},
    "multipleOf": {"type": "integer", "multipleOf": LARGE},
    "maxItems": {"type": "array", "maxItems": 2**63},
    "minLength": {"type": "string", "minLength": 10**30},
    "not": {"not": {"type": "null"}},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 2**53},
}
"""By the keyword that is to be named."""


ROUNDED = {
    "const": [
        *("9007199254740993.0", "0.12345678901234567891", "1e-400"),
        '{"a": [1.00000000000000001]}',
    ],
    "enum": ["[1, 0.10000000000000000001]"],
    "minimum": ["9007199254740991.5", "-1e-5000"],
    "multipleOf": ["0.30000000000000000001"],
    "maximum": ["1e-400"],
}
"""By the keyword, numbers that binary64 would make other numbers of."""
FLOAT = 0.987654321
"""Stands for a number in a body that is not written yet."""


def in_property(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with one property."""
    return {
        "type": "object",
        "properties": {"amount": schema},
        "required": ["amount"],
        "additionalProperties": False,
    }


def in_chat(schema: Any) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return "/v1/chat/completions", {**TURNS, "response_format": form}


def in_required_tool(schema: Any) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return "/v1/chat/completions", {**TURNS, "tools": [tool], "tool_choice": "required"}


def in_strict_tool(schema: Any) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    return "/v1/chat/completions", {**TURNS, "tools": [tool]}


def in_responses(schema: Any) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "name": "x", "schema": schema}
    return "/v1/responses", {"input": "Hello", "text": {"format": form}}


def in_a_tool_of_responses(schema: Any) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "name": "f", "parameters": schema}
    return "/v1/responses", {"input": "Hello", "tools": [tool], "tool_choice": "required"}


def in_messages(schema: Any) -> tuple[str, dict[str, Any]]:
    form = {"format": {"type": "json_schema", "schema": schema}}
    return "/v1/messages", {**TURNS, "model": "tiny", "max_tokens": 9, "output_config": form}


def in_a_tool_of_messages(schema: Any) -> tuple[str, dict[str, Any]]:
    more = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
    return "/v1/messages", {**TURNS, "model": "tiny", "max_tokens": 9, **more}


def in_ollamas_chat(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {**TURNS, "model": "tiny", "format": schema}


def in_ollamas_generate(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"prompt": "Hello", "model": "tiny", "format": schema}


ROUTES = (
    *(in_chat, in_required_tool, in_strict_tool, in_responses, in_a_tool_of_responses),
    *(in_messages, in_a_tool_of_messages, in_ollamas_chat, in_ollamas_generate),
)


def words_of(body: Any) -> str:
    """What a refusal says, in any dialect."""
    error = body["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_every_route_refuses_what_no_grammar_holds(hermes, route, stream):
    """Before a stream begins, in the dialect's form, with the keyword and where it stands."""
    http = Http(hermes.url)
    for keyword, schema in INEXACT.items():
        path, body = route(in_property(schema))
        reply = http.post(path, {**body, "stream": stream})
        assert reply.status == 400, (keyword, reply.body)
        assert keyword in words_of(reply.json)
        assert "/properties/amount" in words_of(reply.json)
        if path.startswith(("/v1/chat", "/v1/responses")):
            assert reply.error["code"] == "unsupported_schema"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_number_that_would_be_rounded_is_refused(hermes, route):
    """Reading the body rounds nothing that a grammar would be made of."""
    for keyword, values in ROUNDED.items():
        for value in values:
            reply = posted_exactly(hermes, route, keyword, value)
            assert reply.status == 400, (keyword, value, reply.body)
            assert keyword in words_of(reply.json)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_number_that_nothing_is_made_of_may_be_rounded(hermes, route):
    """The control: in an annotation, and where binary64 has the number however it is written."""
    for keyword, value in (
        ("default", "0.12345678901234567891"),
        ("const", "1.250000000000000000"),
    ):
        reply = posted_exactly(hermes, route, keyword, value)
        assert reply.status == 200, (keyword, value, reply.body)


def posted_exactly(hermes: Running, route: Any, keyword: str, value: str) -> Reply:
    """The answer to a short request whose schema has ``value`` as it is written."""
    path, body = route(in_property({keyword: FLOAT}))
    limits: dict[str, Any] = {"max_tokens": 5}
    if path == "/v1/responses":
        limits = {"max_output_tokens": 16}
    if path.startswith("/api"):
        limits = {"options": {"num_predict": 5}, "think": False}
    text = json.dumps({**body, **limits, "stream": False})
    assert str(FLOAT) in text
    return Http(hermes.url).send("POST", path, text.replace(str(FLOAT), value).encode(), JSON)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_the_largest_exact_number_is_written_exactly(hermes, route):
    """The control: the same bodies with 2^53 are answered, and the number has all its digits."""
    path, body = route(in_property({"const": 2**53}))
    limits = {"max_tokens": 200, "stream": False}
    if path == "/v1/responses":
        limits = {"max_output_tokens": 200, "stream": False}
    if path.startswith("/api"):
        limits = {"options": {"num_predict": 200}, "stream": False, "think": False}  # type: ignore[dict-item]
    elif path.startswith("/v1/chat"):
        limits["enable_thinking"] = False
    reply = Http(hermes.url).post(path, {**body, **limits})
    assert reply.status == 200, reply.body
    if route is not in_strict_tool:
        assert "9007199254740992" in json.dumps(reply.json)
