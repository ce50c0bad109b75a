"""Formats of answers with OpenAI's own client, and what of tools and formats cannot be done."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from harness.serve.chat import INVALID_ARGUMENTS
from reference.worker_process import WorkerProcess, WorkerRefused
from tests.serve.calling import (
    ASKED,
    CALLING,
    ENUM,
    MESSAGES,
    TOOLS,
    UNTHINKING,
    Weather,
    check_call,
    client_of,
    token_of,
)
from tests.serve.http import Http
from tests.serve.streams import data_of, lines_of


@pytest.fixture
def client(hermes) -> Iterator[OpenAI]:
    with client_of(hermes) as client:
        yield client


def test_the_client_parses_answers_and_arguments(client):
    """Its own way from pydantic types to schemas and back."""
    asked = {**ASKED, "seed": 4, "extra_body": UNTHINKING}
    answer = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    call = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    made = client.chat.completions.parse(**asked, **call).choices[0].message.tool_calls[0]
    assert isinstance(made.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**asked, **call) as stream:
        pieces = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert pieces
    assert "".join(pieces) == final.function.arguments == made.function.arguments
    assert final.function.parsed_arguments == made.function.parsed_arguments


def test_formats(client):
    """An object, a schema, a regular expression; each of ``n`` choices on its own."""
    short = {**ASKED, "extra_body": UNTHINKING}
    schema = {"type": "object", "properties": {"a": ENUM}, "required": ["a"]}
    schema["additionalProperties"] = False
    requested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    both = client.chat.completions.create(**short, seed=1, n=2, response_format=requested)
    for index, choice in enumerate(both.choices):
        jsonschema.validate(json.loads(choice.message.content), schema)
        alone = client.chat.completions.create(**short, seed=1 + index, response_format=requested)
        assert alone.choices[0].message == choice.message
    for seed in range(2):
        asked = {**short, "response_format": {"type": "json_object"}, "seed": seed}
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or json.loads(choice.message.content) is not None
    regex = {"response_format": {"type": "regex", "regex": "a{3,5}/"}}
    asked = {**ASKED, "seed": 1, "extra_body": {**UNTHINKING, **regex}}
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert text in ("aaa/", "aaaa/", "aaaaa/")


def test_a_format_beside_tools_is_for_answers_that_are_no_call(hermes, client):
    """The model decides which of both it writes, and either is whole."""
    requested = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENUM}}
    for begin in ('"', "<tool_call>"):
        asked = {**ASKED, "seed": 1, "tools": TOOLS, "response_format": requested}
        asked["logit_bias"] = {token_of(hermes, begin): 100}
        asked["parallel_tool_calls"] = False
        (choice,) = client.chat.completions.create(**asked, extra_body=UNTHINKING).choices
        if begin == '"':
            assert json.loads(choice.message.content) in ENUM["enum"]
            assert choice.finish_reason == "stop"
        else:
            (call,) = choice.message.tool_calls
            check_call(call.function.name, call.function.arguments)
            assert choice.finish_reason == "tool_calls"


def test_a_format_that_meets_the_limit_ends_with_length(client):
    """Nothing is made up to close it: the text is the beginning of the longer answer."""
    asked = {**ASKED, "seed": 2, "extra_body": UNTHINKING}
    requested = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "abcdef"}}}
    whole = client.chat.completions.create(**asked, response_format=requested).choices[0]
    cut = {**asked, "max_tokens": 4, "response_format": requested}
    choice = client.chat.completions.create(**cut).choices[0]
    assert (whole.finish_reason, choice.finish_reason) == ("stop", "length")
    assert whole.message.content == '"abcdef"'
    assert whole.message.content.startswith(choice.message.content)
    assert len(choice.message.content) < len(whole.message.content)
    call = {**CALLING, "max_tokens": 48, "seed": 2, "extra_body": UNTHINKING}
    ended = client.chat.completions.create(**call).choices[0]
    assert ended.finish_reason == "length"
    (begun,) = ended.message.tool_calls
    whole_call = client.chat.completions.create(**{**call, "max_tokens": 150}).choices[0]
    assert whole_call.finish_reason == "tool_calls"
    (made,) = whole_call.message.tool_calls
    assert made.function.name == begun.function.name
    assert made.function.arguments.startswith(begun.function.arguments)
    assert made.function.arguments != begun.function.arguments


EXPLODING = ["(a?){3000}a{3000}", "(a{1000}){1000}", "(a?){3000}a{3000}|b"]
BAD_REGEXES = [
    *("(", "[", "\\", "a\\", "a{99999999999999999999}", "(?=a)", "(?<x>a)\\k<x>", "\\p{Foo}"),
    *("\\x{110000}", "[^\\s\\S]", "\\b", "?", "(" * 300 + "a" + ")" * 300, "a\\/|\\"),
]


@pytest.mark.parametrize("regex", [*EXPLODING, *BAD_REGEXES])
def test_a_grammar_that_cannot_be_made_is_the_clients_fault(hermes, regex):
    """By a regular expression, and by a pattern where that cannot be made either: 400, or an
    answer. Never the server's."""
    requested = {"type": "regex", "regex": regex}
    reply = Http(hermes.url).post(
        "/v1/chat/completions", {**ASKED, **UNTHINKING, "response_format": requested}
    )
    if reply.status == 200:  # Of what explodes only behind an "a", a "b" was drawn.
        assert regex.endswith("|b")
        assert reply.json["choices"][0]["message"]["content"] == "b"
    else:
        assert (reply.status, reply.error["code"]) == (400, "unsupported_schema")
    if regex in EXPLODING[1:]:
        return
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": regex}}}
    schema["required"] = ["a"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        reply = Http(hermes.url).post("/v1/chat/completions", {**ASKED, **UNTHINKING, **fields})
        assert reply.status in (200, 400)
        assert reply.status == 200 or reply.error["code"] == "unsupported_schema"


def test_a_process_that_the_system_refuses_is_the_servers_matter(hermes, monkeypatch, caplog):
    """A limit of processes or descriptors is reached: a later try may succeed, so it is a 503."""

    def refused(worker: WorkerProcess) -> None:
        raise WorkerRefused("its process cannot be started (Too many open files)")

    http, body = Http(hermes.url), {**ASKED, **UNTHINKING, "max_tokens": 4, "seed": 1}
    known = http.post("/v1/chat/completions", body).json["choices"]
    regex = {"type": "regex", "regex": "never asked [0-9]{3}"}
    template, grammar = body, {"prompt": "hi", "response_format": regex}
    with monkeypatch.context() as patched:
        patched.setattr(WorkerProcess, "_running_child", refused)
        for route, asked in (("chat/completions", template), ("completions", grammar)):
            caplog.clear()
            reply = http.post(f"/v1/{route}", asked)
            assert (reply.status, reply.error["code"]) == (503, "overloaded")
            assert reply.headers["x-should-retry"] == "true"
            assert "the system starts no process" in reply.error["message"]
            assert "Too many open files" in caplog.text
    assert http.post("/v1/chat/completions", body).json["choices"] == known


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", ["[xy](a?){3000}a{3000}"])
def test_a_grammar_that_fails_late_ends_its_own_request(hermes, late, stream, caplog):
    """With an error of the client's, which is no fault for the log; one that goes on beside it has
    the bytes it has alone."""
    http = Http(hermes.url)
    body = {**ASKED, **UNTHINKING, "seed": 1, "max_tokens": 30}
    alone = http.post("/v1/chat/completions", body).json["choices"]
    failing = {**body, "response_format": {"type": "regex", "regex": late}, "stream": stream}
    with ThreadPoolExecutor(3) as clients:
        background = clients.submit(http.post, "/v1/chat/completions", body)
        failed = list(clients.map(lambda _: http.post("/v1/chat/completions", failing), range(2)))
        assert background.result().json["choices"] == alone
    for reply in failed:
        if stream:
            assert reply.status == 200
            error = data_of(lines_of(reply.body))[-1]["error"]
        else:
            assert reply.status == 400
            error = reply.error
        assert error["code"] == "unsupported_schema"
        assert error["param"] == "response_format"
        assert "cannot be held to any longer" in error["message"]
    failures = [one for one in caplog.records if "masks failed" in one.getMessage()]
    assert failures
    assert not any(one.exc_info for one in failures)


def test_empty_arguments_of_an_earlier_call_are_none(hermes):
    """As some clients send them back. A call that was cut off comes back, too: its text is there
    for the model to read."""

    def prompt_of(*arguments: str | None) -> str:
        function: dict[str, Any] = {"name": "f"}
        if arguments:
            function["arguments"] = arguments[0]
        call = {"id": "a", "type": "function", "function": function}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        reply = Http(hermes.url).post("/apply-template", {"messages": [*MESSAGES, turn]})
        prompt: str = reply.answer["prompt"]
        return prompt

    assert (
        prompt_of("")
        == prompt_of("null")
        == prompt_of(" ")
        == prompt_of("{}")
        == prompt_of(None)
        == prompt_of()
    )
    assert '"arguments": {}' in prompt_of("")
    for text in ('{"city": "New', "[1]", '{"a": 1, "a": 2}', '"{}"', "1" * 5000):
        assert f'"arguments": {json.dumps({INVALID_ARGUMENTS: text})}' in prompt_of(text)


def test_a_template_without_thoughts_has_none(http):
    """That of the plain model of the other tests."""
    asked = {"enable_thinking": True}
    for fields in (asked, {"chat_template_kwargs": asked}):
        reply = http.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
        assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))
    for effort in ("none", "low"):
        hint = {"messages": MESSAGES, "reasoning_effort": effort, "max_tokens": 1}
        answer = http.post("/v1/chat/completions", hint).json
        assert answer["x_zinc"]["ignored"] == ["reasoning_effort"]
