"""``/v1/responses`` as OpenAI's client asks it: whole and streamed."""

from typing import Any

import msgspec
import openai
import pytest

from harness.serve.responses.parse import chat_of
from harness.serve.responses.render import ResponseEvents, response_of
from harness.serve.responses.wire import ResponsesRequest
from tests.held_steps import hold_steps

ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "Why is the sky blue?",
    "max_output_tokens": 16,
    "extra_body": {"seed": 11},
}
CHAT: dict[str, Any] = {"model": "tiny", "seed": 11, "max_tokens": 16}


def test_an_answer_is_that_of_the_conversation(client):
    """Of a text, of items, and with instructions: what chat completions say."""
    items = [
        {"role": "user", "content": "Why is the sky blue?"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Air.", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "And "},
                                     {"type": "input_text", "text": "at night?"}]},
    ]  # fmt: skip
    messages = [
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air."},
        {"role": "user", "content": "And at night?"},
    ]
    system = {"role": "system", "content": "be brief"}
    for more, conversation in (
        ({}, messages[:1]),
        ({"instructions": "be brief"}, [system, *messages[:1]]),
        ({"input": items}, messages),
    ):
        answer = client.responses.create(**{**ASKED, **more})
        chat = client.chat.completions.create(**CHAT, messages=conversation)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage is not None
        assert chat.usage is not None
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        assert answer.model_extra is not None
        assert answer.model_extra["system_fingerprint"] == chat.system_fingerprint


def test_how_an_answer_ends(client):
    cut = client.responses.create(
        **{**ASKED, "extra_body": {"seed": 11, "temperature": 0}, "max_output_tokens": 2}
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.store is True
    assert cut.previous_response_id is None


def test_a_stream_says_what_the_whole_answer_says(client):
    """In the order the client's own accumulator demands, and numbered without a gap."""
    client.responses.create(**ASKED)  # both find as much of the prompt in the cache
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        "response.content_part.added",
    ]
    ending = "response.incomplete" if whole.status == "incomplete" else "response.completed"
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        ending,
    ]
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == whole.output_text
    last = events[-1].response  # type: ignore[union-attr]
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    assert last.status == whole.status


def test_the_clients_accumulator_reads_a_stream(client):
    """Of an answer that ends by itself: it knows no other end. Seed 3 ends soon."""
    for seed in range(3, 33):
        asked = {**ASKED, "max_output_tokens": 150, "extra_body": {"seed": seed}}
        whole = client.responses.create(**asked)
        if whole.status == "completed":
            with client.responses.stream(**asked) as stream:
                for _ in stream:
                    pass
                assert stream.get_final_response().output_text == whole.output_text
            return
    pytest.fail("no answer ended by itself")


def test_a_stream_that_fails_raises(server, client, monkeypatch):
    """The client gets an exception with the message, not a short answer."""
    steps = hold_steps(monkeypatch, 5)
    stream = client.responses.create(**{**ASKED, "max_output_tokens": 200}, stream=True)
    next(iter(stream))
    driver = server.service.model.driver

    def fail(engine: Any) -> None:
        for sequence in list(engine._live.values()):
            engine._failed.append(sequence)

    driver.call(fail)
    steps.allow()
    with pytest.raises(openai.APIError, match="failed on this request"):
        for _ in stream:
            pass


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def test_calls_and_thoughts_are_items(server):
    """What a model with tools would say, streamed and whole: the same items."""
    body = msgspec.convert({"input": "a", "tools": [TOOL]}, ResponsesRequest)
    head = {
        "id": "chatcmpl-1", "created": 5, "model": "m", "service_tier": "default",
        "system_fingerprint": "f", "x_zinc": {},
    }  # fmt: skip
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning_content": "m"},
        {"content": "I add."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "add", "arguments": "{}"}}]},
    ]
    chunks = [head | {"choices": [{"delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append(head | {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    chunks.append(head | {"choices": [], "usage": usage})
    events = ResponseEvents(body)
    told = b"".join(event for chunk in chunks for event in events.chunk(chunk))
    streamed = msgspec.json.decode(told.rstrip().rpartition(b"data: ")[2])["response"]
    message = {
        "content": "I add.",
        "reasoning_content": "hmm",
        "tool_calls": [
            {"id": "c1", "function": {"name": "add", "arguments": '{"a":1}'}},
            {"id": "c2", "function": {"name": "add", "arguments": "{}"}},
        ],
    }
    choice = {"message": message, "finish_reason": "tool_calls"}
    whole = response_of(body, head | {"choices": [choice], "usage": usage})
    for response in (streamed, whole):
        for item in response["output"]:
            del item["id"]
    assert streamed == whole
    assert [item["type"] for item in whole["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert whole["output"][2]["arguments"] == '{"a":1}'


def test_the_tokens_of_a_text_behind_several_thoughts_are_listed():
    """A whole answer has the thoughts joined by line breaks, where the model wrote marks."""
    pieces = ["h", "m", "<|end|>", "so", "<|end|>", "h", "i"]
    listed = [
        {"token": one, "bytes": list(one.encode()), "logprob": -1.0, "top_logprobs": []}
        for one in pieces
    ]
    message = {"content": "hi", "reasoning_content": "hm\nso"}
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 1)
    chat: dict[str, Any] = {
        "id": "r", "created": 0, "model": "m", "service_tier": "default",
        "system_fingerprint": "f", "x_zinc": {},
        "choices": [{"message": message, "finish_reason": "stop", "logprobs": {"content": listed}}],
        "usage": {
            **counts,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }  # fmt: skip
    _, said = response_of(ResponsesRequest(input="x"), chat)["output"]
    assert [one["token"] for one in said["content"][0]["logprobs"]] == ["h", "i"]


def test_the_items_of_an_answer_are_one_turn():
    """As chat completions have it, thoughts, text and calls together; thoughts alone are none."""
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 2?"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I add."},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": "3"},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "or so"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "?"}]},
        {"role": "user", "content": "sure?"},
    ]
    messages = chat_of(msgspec.convert({"input": items}, ResponsesRequest))["messages"]
    roles = ["user", "assistant", "tool", "tool", "assistant", "assistant", "user"]
    assert [message["role"] for message in messages] == roles
    turn = messages[1]
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "I add.")
    assert [one["id"] for one in turn["tool_calls"]] == ["c1", "c2"]
    assert [message["content"] for message in messages[4:]] == ["3", "or so", "sure?"]
    assert not any("reasoning_content" in message for message in messages[2:])


def test_calls_given_back_are_turns_of_the_conversation():
    items = [
        {"role": "user", "content": "1 + 2?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    requested = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = {
        "input": items, "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": requested}, "reasoning": {"effort": "low"},
    }  # fmt: skip
    chat = chat_of(msgspec.convert(body, ResponsesRequest))
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool"]
    assert [call["id"] for call in chat["messages"][1]["tool_calls"]] == ["c1", "c2"]
    assert chat["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert chat["tools"][0]["function"]["name"] == "add"
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert chat["response_format"]["json_schema"] == {
        "name": "n", "schema": {"type": "object"}, "strict": True,
    }  # fmt: skip
    assert chat["reasoning_effort"] == "low"
