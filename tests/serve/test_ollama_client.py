"""Ollama's own client against ``/api``: what it reads is what the engine computed."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import ollama
import pytest
from ollama import Client

from harness.serve.keys import new_key
from harness.serve.ollama.parse import plain_schemas
from tests.serve.calling import TOOLS
from tests.serve.http import Http, bearer
from tests.serve.speaking_models import CONTEXT, speaking_model
from tests.serve.tenants import write_tenants

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
OPTIONS = {"seed": 11, "num_predict": 12, "temperature": 0.9}
SAME = {"seed": 11, "max_tokens": 12, "temperature": 0.9}


@pytest.fixture
def llama(server) -> Iterator[Client]:
    """Ollama's client for the plain model."""
    with Client(server.url) as client:
        yield client


@pytest.fixture
def agent(hermes) -> Iterator[Client]:
    """Ollama's client for a model that calls tools."""
    with Client(hermes.url) as client:
        yield client


@pytest.fixture
def thinker(serve, tmp_path) -> Iterator[Client]:
    """Ollama's client for a model whose prompts begin its thoughts."""
    path = speaking_model(tmp_path, "Qwen3.5-4B")
    with serve(path=path, context=CONTEXT) as server, Client(server.url) as client:
        yield client


def test_a_chat_is_what_a_chat_completion_says(llama, http):
    answer = llama.chat("tiny", MESSAGES, options=OPTIONS)
    chat = http.post(CHAT, {"messages": MESSAGES, **SAME}).json
    assert answer.message.content == chat["choices"][0]["message"]["content"]
    assert answer.model == "tiny"
    assert answer.done
    assert answer.done_reason == (
        "length" if chat["choices"][0]["finish_reason"] == "length" else "stop"
    )
    assert answer.prompt_eval_count == chat["usage"]["prompt_tokens"]
    assert answer.eval_count == chat["usage"]["completion_tokens"]
    assert answer.total_duration >= answer.eval_duration > 0  # type: ignore[operator]


def test_a_stream_says_what_the_whole_answer_says(llama):
    whole = llama.chat("tiny:latest", MESSAGES, options=OPTIONS)
    parts = list(llama.chat("tiny", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, whole.done_reason)
    generated = list(llama.generate("tiny", "Why?", options=OPTIONS, stream=True))
    one = llama.generate("tiny", "Why?", options=OPTIONS)
    assert "".join(part.response or "" for part in generated) == one.response


def test_lines_are_json_and_a_stream_is_the_default(http):
    reply = http.post("/api/chat", {"model": "tiny", "messages": MESSAGES, "options": OPTIONS})
    assert reply.headers["Content-Type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.body.splitlines()]
    assert lines[-1]["done"] is True
    assert lines[-1]["x_zinc"]["seed"] == 11
    silent = http.post("/api/chat", {"model": "tiny", "messages": MESSAGES, "stream": False})
    assert silent.headers["Content-Type"] == "application/json"


def test_a_prompt_is_a_conversation_or_a_text(llama, http):
    """Of one turn, with a system prompt if there is one; raw, the text goes on."""
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Why?"}
    chat = http.post(CHAT, {"messages": [system, user], **SAME}).json["choices"][0]
    told = llama.generate("tiny", "Why?", system="Be brief.", options=OPTIONS)
    assert told.response == chat["message"]["content"]
    text = http.post("/v1/completions", {"prompt": "abc", **SAME}).json["choices"][0]["text"]
    assert llama.generate("tiny", "abc", raw=True, options=OPTIONS).response == text
    stream = llama.generate("tiny", "abc", raw=True, options=OPTIONS, stream=True)
    assert "".join(part.response or "" for part in stream) == text
    endless = {**OPTIONS, "num_predict": -1, "temperature": 0}
    assert llama.generate("tiny", "abc", raw=True, options=endless).eval_count > 100  # type: ignore[operator]


def test_a_call_is_made_and_answered(agent, hermes):
    """The schemas that the client writes have nulls, which say nothing. Calls are whole; results
    are those of the calls before them."""
    http = Http(hermes.url)
    plain = agent.chat("tiny", MESSAGES, options=OPTIONS, think=False)
    offered = agent.chat("tiny", MESSAGES, tools=TOOLS, options=OPTIONS, think=False)
    assert offered.prompt_eval_count > plain.prompt_eval_count  # type: ignore[operator]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "warm", "tool_name": "get_weather"},
        {"role": "tool", "content": "cold", "tool_name": "get_weather"},
    ]
    assert agent.chat("tiny", history, tools=TOOLS, options=OPTIONS, think=False).done
    asked = {"model": "tiny", "messages": history, "tools": TOOLS, "options": OPTIONS}
    told = http.post("/api/chat", {**asked, "think": False, "stream": False}).json
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(2)]
    as_chat = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "warm", "tool_call_id": "c0"},
        {"role": "tool", "content": "cold", "tool_call_id": "c1"},
    ]
    body = {"messages": as_chat, "tools": TOOLS, "reasoning_effort": "none", "max_tokens": 1}
    used = http.post(CHAT, body).json["usage"]["prompt_tokens"]
    assert told["prompt_eval_count"] == used


def test_calls_are_told_whole(agent, monkeypatch):
    """As the model writes them: a grammar makes it write some."""
    from harness.serve.ollama import routes

    convert = routes.chat_of

    def forced(body: Any) -> Any:
        chat = convert(body)
        chat.tool_choice = "required"
        return chat

    monkeypatch.setattr(routes, "chat_of", forced)
    options = {"seed": 3, "num_predict": 150}
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    whole = agent.chat("tiny", MESSAGES, tools=tools, options=options, think=False)
    calls = whole.message.tool_calls
    assert calls
    for call in calls:
        jsonschema.validate(dict(call.function.arguments), parameters)
    parts = agent.chat("tiny", MESSAGES, tools=tools, options=options, think=False, stream=True)
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    assert streamed == calls


def test_thoughts_are_apart(thinker):
    """By default as the model's template has it, and as the client asks."""
    reasoning = thinker.chat("tiny", MESSAGES, options=OPTIONS, think=True)
    assert reasoning.message.thinking
    parts = list(thinker.chat("tiny", MESSAGES, options=OPTIONS, think="high", stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == reasoning.message.thinking
    assert not thinker.chat("tiny", MESSAGES, options=OPTIONS, think=False).message.thinking
    assert thinker.generate("tiny", "Why?", options=OPTIONS, think=True).thinking


def test_a_format_is_kept(agent):
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    options = {**OPTIONS, "num_predict": 60}
    answer = agent.chat("tiny", MESSAGES, format=schema, options=options, think=False)
    jsonschema.validate(json.loads(answer.message.content or ""), schema)


def test_models_are_listed_and_shown(llama, server):
    model = server.service.model
    (listed,) = llama.list().models
    assert listed.model == "tiny"
    assert listed.size == model.model.file.path.stat().st_size
    assert listed.details is not None
    assert listed.details.family == "qwen3"
    (loaded,) = llama.ps().models
    assert (loaded.name, loaded.context_length) == ("tiny", model.context)
    shown = llama.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "qwen3"
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    assert "temperature 1" in (shown.parameters or "")
    assert Http(server.url).get("/api/version").json["version"]


def test_vectors_are_those_of_the_other_route(llama, http):
    answer = llama.embed("tiny", ["hello", "you"], keep_alive="5m")
    expected = http.post("/v1/embeddings", {"input": ["hello", "you"]}).json
    assert list(map(list, answer.embeddings)) == [one["embedding"] for one in expected["data"]]
    assert answer.prompt_eval_count == expected["usage"]["prompt_tokens"]
    old = llama.embeddings("tiny", "hello")
    assert list(old.embedding) == expected["data"][0]["embedding"]


def test_a_request_without_a_turn_loads_the_model(llama):
    assert llama.chat("tiny").done_reason == "load"
    assert llama.generate("tiny", "", keep_alive=-1).done_reason == "load"


def test_errors_are_the_clients_own_class(llama):
    with pytest.raises(ollama.ResponseError, match="nobody") as refused:
        llama.chat("nobody", MESSAGES)
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="nobody"):
        llama.show("nobody")
    with pytest.raises(ollama.ResponseError, match="no model of the catalog"):
        llama.pull("nobody")


def test_a_key_is_asked_for(serve, tmp_path):
    key = new_key()
    with (
        serve(tenants=write_tenants(tmp_path, {"alice": key})) as server,
        Client(server.url, headers=bearer(key)) as alice,
        Client(server.url) as nobody,
    ):
        assert alice.chat("tiny", MESSAGES, options=OPTIONS).done
        with pytest.raises(ollama.ResponseError) as refused:
            nobody.chat("tiny", MESSAGES)
        assert refused.value.status_code == 401
        with pytest.raises(ollama.ResponseError) as refused:
            alice.pull("qwen3-0.6b")
        assert refused.value.status_code == 403


def test_a_null_that_a_schema_demands_is_no_null_that_says_nothing():
    schema = {"properties": {"a": {"const": None, "description": None}, "b": {"enum": [None]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    plain = plain_schemas({"tools": [tool]}, [])["tools"][0]["function"]["parameters"]
    assert plain == {"properties": {"a": {"const": None}, "b": {"enum": [None]}}}
