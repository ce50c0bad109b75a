"""Anthropic's own client against ``/v1/messages``: what it reads is what the engine computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from contract.arithmetic import PAGE_TOKENS
from harness.serve.keys import new_key
from harness.serve.run import Running
from tests.late_module import LateModule
from tests.serve.calling import PARAMETERS, TOOLS
from tests.serve.http import JSON, Http
from tests.serve.speaking_models import CONTEXT, speaking_model
from tests.serve.tenants import write_tenants

if TYPE_CHECKING:
    from anthropic import Anthropic

anthropic = LateModule("anthropic")
MESSAGES_PATH = "/v1/messages"
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "extra_body": {"seed": 11},
}
RAW = {name: value for name, value in ASKED.items() if name != "extra_body"} | {"seed": 11}
OWN_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", "What time it is."),
        "input_schema": tool["function"]["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
    for tool in TOOLS
]
CALLING: dict[str, Any] = {**ASKED, "max_tokens": 150, "tools": OWN_TOOLS}


def plain(message: Any) -> list[dict[str, Any]]:
    """What a message says, without what the client adds to it."""
    return [block.model_dump(exclude={"parsed_output"}) for block in message.content]


def client_for(server: Running, **more: Any) -> Anthropic:
    more = {"api_key": "unused", "max_retries": 0} | more
    client: Anthropic = anthropic.Anthropic(base_url=server.url, **more)
    return client


@pytest.fixture
def claude(server) -> Iterator[Anthropic]:
    """Anthropic's client for the plain model."""
    with client_for(server) as client:
        yield client


@pytest.fixture
def agent(hermes) -> Iterator[Anthropic]:
    """Anthropic's client for a model that thinks and calls tools."""
    with client_for(hermes) as client:
        yield client


@pytest.fixture
def thinker(serve, tmp_path) -> Iterator[Anthropic]:
    """Anthropic's client for a model whose prompts begin its thoughts."""
    path = speaking_model(tmp_path, "Qwen3.5-4B")
    with serve(path=path, context=CONTEXT) as server, client_for(server) as client:
        yield client


def test_a_message_is_what_a_chat_completion_says(claude, http):
    sampling = {"temperature": 1.0, "top_k": 3, "top_p": 0.9}
    message = claude.messages.create(**{**ASKED, "extra_body": {"seed": 11, **sampling}})
    chat = http.post(CHAT, {**RAW, **sampling}).json
    (block,) = message.content
    assert block.type == "text"
    assert block.text == chat["choices"][0]["message"]["content"]
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.stop_reason in ("max_tokens", "end_turn")
    counts = message.usage
    cached = (counts.cache_read_input_tokens or 0) + (counts.cache_creation_input_tokens or 0)
    assert counts.input_tokens + cached == chat["usage"]["prompt_tokens"]
    assert counts.output_tokens == chat["usage"]["completion_tokens"]
    assert message._request_id is not None
    assert message._request_id.startswith("req_")


def test_a_stream_says_what_the_whole_message_says(claude):
    claude.messages.create(**ASKED)  # both find as much of the prompt in the cache
    whole = claude.messages.create(**ASKED)
    with claude.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert final.usage == whole.usage
    assert final.stop_reason == whole.stop_reason
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "content_block_start" in kinds
    assert "content_block_stop" in kinds


def test_the_events_of_a_stream_are_the_protocols(http):
    """Each named after its type, in order, with a ping."""
    body = http.post(MESSAGES_PATH, {**RAW, "stream": True}).body
    events = [part.split(b"\n") for part in body.decode().encode().split(b"\n\n") if part]
    kinds = []
    for name, data in events:
        kinds.append(name.removeprefix(b"event: ").decode())
        assert json.loads(data.removeprefix(b"data: "))["type"] == kinds[-1]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = json.loads(events[0][1].removeprefix(b"data: "))["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)


def test_a_system_prompt_is_a_text_or_blocks(claude, hermes):
    """Blocks are lines of one text, as those of a turn are; marks for a cache change nothing."""
    http = Http(hermes.url)

    def tokens(system: object, content: object) -> int:
        turn = {"role": "user", "content": content}
        body = {"model": "tiny", "system": system, "messages": [turn]}
        count: int = http.post(f"{MESSAGES_PATH}/count_tokens", body).json["input_tokens"]
        return count

    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    blocks = [{"type": "text", "text": text, **mark} for text in ("Be brief.", "Be kind.")]
    assert tokens(blocks, blocks) == tokens("Be brief.\nBe kind.", "Be brief.\nBe kind.")
    assert tokens("Be brief.", "a") != tokens("Be kind and brief.", "a")
    message = claude.messages.create(**ASKED, system=blocks)
    assert message.model_extra is not None
    assert "ignored" not in message.model_extra["x_zinc"]


def test_tokens_are_counted_as_they_are_used(agent):
    """With tools, thoughts and without."""
    for more in ({}, {"tools": OWN_TOOLS}, {"thinking": {"type": "adaptive"}}, {"system": "x"}):
        asked = {"model": "tiny", "messages": ASKED["messages"], **more}
        counted = agent.messages.count_tokens(**asked).input_tokens
        usage = agent.messages.create(**asked, max_tokens=1).usage
        assert usage.cache_read_input_tokens is not None
        assert usage.cache_creation_input_tokens is not None
        used = usage.input_tokens + usage.cache_read_input_tokens
        assert counted == used + usage.cache_creation_input_tokens


def test_what_the_cache_was_given_is_read_from_it(serve):
    """The same prompt again reads what the first wrote, also within a page; a longer one goes on
    from there."""
    for length in (3 * PAGE_TOKENS, 3 * PAGE_TOKENS + 5, 5 * PAGE_TOKENS - 1):
        with serve() as server, client_for(server) as claude:
            text = "abcdefghij" * 20
            asked = {**ASKED, "messages": [{"role": "user", "content": text[:length]}]}
            first, second = (claude.messages.create(**asked).usage for _ in range(2))
            assert first.cache_read_input_tokens == 0
            assert first.cache_creation_input_tokens
            assert second.cache_read_input_tokens == first.cache_creation_input_tokens
            assert second.cache_creation_input_tokens == 0
            assert first.input_tokens + first.cache_creation_input_tokens == (
                second.input_tokens + (second.cache_read_input_tokens or 0)
            )


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_is_made_and_answered(agent, choice):
    """Whole and streamed alike; its result, also one of a failure, can be sent back."""
    asked = {**CALLING, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    message = agent.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    jsonschema.validate(call.input, PARAMETERS[call.name])
    assert choice.get("name", call.name) == call.name
    with agent.messages.stream(**asked) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    assert plain(final) == plain(message)
    assert final.stop_reason == "tool_use"
    assert json.loads(pieces or "{}") == call.input

    def tokens(result: dict[str, Any]) -> int:
        block = {"type": "tool_result", "tool_use_id": call.id, **result}
        answered = {"role": "user", "content": [block, {"type": "text", "text": "And now?"}]}
        said = {"role": "assistant", "content": [b.model_dump() for b in message.content]}
        messages = [*ASKED["messages"], said, answered]
        counted = agent.messages.count_tokens(model="tiny", messages=messages, tools=OWN_TOOLS)  # type: ignore[arg-type]
        return counted.input_tokens

    text = tokens({"content": "It is warm."})
    assert tokens({"content": [{"type": "text", "text": "It is warm."}]}) == text
    assert tokens({"content": "It is warm.", "is_error": True}) > text
    assert tokens({}) < text


def test_no_tool_is_called_where_none_may_be(agent, hermes):
    """The model is not even told of them; auto tells it."""
    bare = agent.messages.create(**ASKED).usage
    none = agent.messages.create(**ASKED, tools=OWN_TOOLS, tool_choice={"type": "none"}).usage
    auto = agent.messages.create(**ASKED, tools=OWN_TOOLS, tool_choice={"type": "auto"}).usage
    totals = [
        one.input_tokens
        + (one.cache_read_input_tokens or 0)
        + (one.cache_creation_input_tokens or 0)
        for one in (bare, none, auto)
    ]
    assert totals[0] == totals[1] < totals[2]
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        agent.messages.create(**ASKED, tool_choice={"type": "any"})


def test_thoughts_are_blocks_with_signatures(thinker):
    """Only when they are asked for, streamed as they are whole, and taken back."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = thinker.messages.create(**ASKED, thinking=thinking)
    block = message.content[0]
    assert block.type == "thinking"
    assert block.thinking
    assert block.signature
    with thinker.messages.stream(**ASKED, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert plain(final) == plain(message)
    asked = {"model": "tiny", "messages": ASKED["messages"]}
    unasked, disabled, enabled = (
        thinker.messages.count_tokens(**asked, **more).input_tokens
        for more in ({}, {"thinking": {"type": "disabled"}}, {"thinking": thinking})
    )
    assert unasked == disabled != enabled
    said = [
        {"type": "thinking", "thinking": block.thinking, "signature": block.signature},
        {"type": "redacted_thinking", "data": "gAAAA"},
        {"type": "text", "text": "Yes."},
    ]
    history = [*ASKED["messages"], {"role": "assistant", "content": said}, *ASKED["messages"]]
    assert thinker.messages.create(**{**ASKED, "messages": history}).content


def test_a_model_that_cannot_think_is_asked_in_vain(claude):
    message = claude.messages.create(
        **ASKED, thinking={"type": "enabled", "budget_tokens": 1024}, metadata={"user_id": "u"}
    )
    assert message.model_extra is not None
    assert message.model_extra["x_zinc"]["ignored"] == ["thinking"]


def test_a_stop_sequence_is_named(claude):
    asked = {**ASKED, "max_tokens": 40, "extra_body": {"seed": 12, "temperature": 1.5}}
    whole = claude.messages.create(**asked).content[0].text  # type: ignore[union-attr]
    assert len(whole) > 5
    stop = whole[3:5]
    message = claude.messages.create(**asked, stop_sequences=["never said", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole[: whole.index(stop)]  # type: ignore[union-attr]
    with claude.messages.stream(**asked, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    cut = claude.messages.create(**{**ASKED, "max_tokens": 2})
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_a_form_of_the_answer_is_kept(agent):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    message = agent.messages.create(
        **{**ASKED, "max_tokens": 60},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    text = "".join(block.text for block in message.content if block.type == "text")
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"type": "image", "source": {"type": "url", "url": "x"}}, "images are not served"),
        ({"type": "document", "source": {}}, "documents are not served"),
    ],
)
def test_what_is_no_text_is_refused_by_name(claude, content, says):
    result = {"type": "tool_result", "tool_use_id": "a", "content": [content]}
    for block in (content, result):
        turn = [{"role": "user", "content": [block]}]
        with pytest.raises(anthropic.BadRequestError, match=says):
            claude.messages.create(**{**ASKED, "messages": turn})


def test_what_anthropics_server_runs_is_left_out(agent):
    """Its tools, and blocks that it made for itself."""
    said = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "Found."},
    ]
    history = [*ASKED["messages"], {"role": "assistant", "content": said}, *ASKED["messages"]]
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    message = agent.messages.create(**{**ASKED, "messages": history}, tools=hosted)
    assert message.model_extra is not None
    assert message.model_extra["x_zinc"]["ignored"] == [
        "tools[0] (web_search_20250305)",
        "messages[].content[] (server_tool_use)",
        "messages[].content[] (web_search_tool_result)",
    ]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "is not empty"),
        ({"extra_body": {"temprature": 1}}, "temperature"),
        ({"tools": OWN_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "among the tools"),
        ({"extra_body": {"tool_choice": {"type": "tool"}}}, "tool_choice.name"),
    ],
)
def test_a_refusal_is_the_clients_own_class(agent, more, says):
    with pytest.raises(anthropic.BadRequestError, match=says) as refused:
        agent.messages.create(**{**ASKED, **more})
    body = refused.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_an_unknown_model_and_a_body_that_is_no_json(claude, http):
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        claude.messages.create(**{**ASKED, "model": "claude-9"})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.count_tokens(model="claude-9", messages=ASKED["messages"])
    reply = http.send("POST", MESSAGES_PATH, b"{", JSON)
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert http.get(MESSAGES_PATH).status == 405


def test_a_key_is_a_header_of_its_own(serve, tmp_path):
    """As the client sends it, or as a bearer token; the wrong one is its own class of error."""
    key = new_key()
    with serve(tenants=write_tenants(tmp_path, {"alice": key})) as server:
        for right in ({"api_key": key}, {"api_key": None, "auth_token": key}):
            with client_for(server, **right) as claude:
                assert claude.messages.create(**ASKED).content
        with client_for(server) as claude, pytest.raises(anthropic.AuthenticationError):
            claude.messages.create(**ASKED)
        http = Http(server.url)
        assert http.get("/v1/models", X_Api_Key=key).status == 200
        assert http.get("/v1/models", X_Api_Key="x").status == 401
        headers = {"X_Api_Key": key, "anthropic_version": "2023-06-01"}
        assert http.post(MESSAGES_PATH, RAW, **headers).status == 200


def test_models_are_listed_for_this_client_too(claude):
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert model.created_at.year >= 2020
    assert claude.models.retrieve("tiny").id == "tiny"
