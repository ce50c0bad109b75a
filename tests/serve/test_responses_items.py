"""``/v1/responses``: tokens listed, items that other servers answered with, and references."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.serve.responses.render import tokens_of_text
from tests.serve.calling import TOOLS
from tests.serve.http import Http
from tests.serve.streams import data_of, lines_of

RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "tiny", "input": "Why?", "max_output_tokens": 12,
    "include": ["message.output_text.logprobs"], "extra_body": {"seed": 11},
}  # fmt: skip
PLAIN: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "extra_body": {"seed": 4}}


def test_tokens_are_listed_when_they_are_included(client):
    """As chat completions list them; streamed pieces are the whole list."""
    whole = client.responses.create(**ASKED, top_logprobs=3)
    (item,) = whole.output
    listed = item.content[0].logprobs  # type: ignore[union-attr]
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Why?"}],
        max_tokens=12,
        seed=11,
        logprobs=True,
        top_logprobs=3,
    )
    expected = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [(one.token, one.logprob) for one in listed] == [
        (one.token, one.logprob) for one in expected
    ]
    assert all(len(one.top_logprobs) == 3 for one in listed)
    events = list(client.responses.create(**ASKED, top_logprobs=3, stream=True))
    deltas = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    done = next(e for e in events if e.type == "response.output_text.done")
    assert [one.logprob for one in deltas] == [one.logprob for one in listed]
    assert [one.token for one in done.logprobs] == [one.token for one in listed]
    last = events[-1].response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert last == listed


def test_tokens_are_not_listed_unasked(client):
    plain = {**ASKED, "include": ["reasoning.encrypted_content"]}
    whole = client.responses.create(**plain)
    assert whole.output[0].content[0].logprobs == []  # type: ignore[union-attr]
    assert whole.model_extra is not None
    ignored = whole.model_extra["x_zinc"]["ignored"]
    assert ignored == ["include (reasoning.encrypted_content)"]


@given(st.lists(st.text(max_size=3)), st.lists(st.text(max_size=3)), st.text(max_size=4))
def test_the_tokens_of_a_text_have_its_bytes(reasoning, text, mark):
    pieces = [*reasoning, mark, *text]
    listed = [{"token": one, "bytes": list(one.encode())} for one in pieces]
    found = tokens_of_text("".join(text), listed)
    said = b"".join(bytes(one["bytes"]) for one in found)
    assert "".join(text).encode() in said or not text


def test_thoughts_and_marks_are_no_tokens_of_the_text():
    pieces = ["so", " ", "a", "</think>", "\n\n", "a", " b", "<call>", "a b"]
    listed = [{"token": one, "bytes": list(one.encode())} for one in pieces]
    found = tokens_of_text("a b", listed)
    assert [one is listed[n] for one, n in zip(found, (5, 6), strict=True)] == [True, True]


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Look it up."},
    {"type": "reasoning", "id": "rs_1",
     "summary": [{"type": "summary_text", "text": "I should look."}], "encrypted_content": "gAAAA",
     "status": None},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "message", "role": "assistant", "id": "msg_1", "phase": "final_answer",
     "content": [{"type": "output_text", "text": "Let me see.",
                  "annotations": [{"type": "url_citation", "url": "x", "start_index": 0}],
                  "logprobs": [{"token": "Let", "logprob": -0.5}]}]},
    {"type": "custom_tool_call", "call_id": "c1", "name": "get_time", "input": "now"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "noon"},
    {"type": "message", "role": "assistant",
     "content": [{"type": "refusal", "refusal": "I cannot."}]},
    {"role": "user", "content": [{"type": "input_text", "text": "Go on.", "x": 1}]},
]  # fmt: skip
AS_CHAT = [
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "I should look.",
     "tool_calls": [{"id": "c1", "type": "function",
                     "function": {"name": "get_time", "arguments": '{"input": "now"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    {"role": "assistant", "content": None, "refusal": "I cannot.", "annotations": [{"x": 1}]},
    {"role": "user", "content": "Go on."},
]  # fmt: skip


def test_items_of_other_servers_are_read(hermes):
    """What says something to the model is said, by both routes alike; the rest is named."""
    http = Http(hermes.url)
    asked = {"seed": 4, "temperature": 1.0}
    answer = http.post(RESPONSES, {"input": ITEMS, "max_output_tokens": 8, **asked})
    assert answer.status == 200
    assert answer.json["x_zinc"]["ignored"] == [
        "input[2] (web_search_call)",
        "input[].phase",
        "input[].content[].x",
    ]
    chat = http.post(CHAT, {"messages": AS_CHAT, "max_tokens": 8, **asked}).json
    used = answer.json["usage"]
    assert used["input_tokens"] == chat["usage"]["prompt_tokens"]
    texts = [part["text"] for item in answer.json["output"] for part in item["content"]]
    message = chat["choices"][0]["message"]
    assert "".join(texts) == (message.get("reasoning_content") or "") + (message["content"] or "")
    without = [item for item in ITEMS if item.get("type") != "reasoning"]
    fewer = http.post(RESPONSES, {"input": without, "max_output_tokens": 8, **asked}).json
    assert fewer["usage"]["input_tokens"] <= used["input_tokens"]


def test_an_answer_in_the_background_is_refused(hermes):
    refused = Http(hermes.url).post(RESPONSES, {"input": "hello", "background": True})
    assert (refused.status, refused.error["code"]) == (400, "unsupported")
    assert refused.error["param"] == "background"
    assert "stream it" in refused.error["message"]


def test_what_is_too_long_is_refused_under_any_truncation(hermes):
    """A client's wish that something be dropped is ignored, and named."""
    http = Http(hermes.url)
    asked = {"input": "hello", "max_output_tokens": 2, "truncation": "auto"}
    reply = http.post(RESPONSES, asked)
    assert reply.json["x_zinc"]["ignored"] == ["truncation"]
    assert reply.json["truncation"] == "disabled"
    assert http.post(RESPONSES, {**asked, "truncation": "none"}).error["param"] == "truncation"
    long = http.post(RESPONSES, {**asked, "input": "hello " * 2000})
    assert long.error["code"] == "context_length_exceeded"


CONTINUED = [{"role": "user", "content": "Go on."}]


def test_a_refusal_is_what_the_model_said(hermes):
    http = Http(hermes.url)

    def prompt(turn: dict[str, object]) -> str:
        messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]
        text: str = http.post("/apply-template", {"messages": messages}).json["prompt"]
        return text

    said = prompt({"role": "assistant", "content": "No."})
    assert prompt({"role": "assistant", "content": None, "refusal": "No."}) == said
    assert prompt({"role": "assistant", "content": "No.", "refusal": None, "audio": None}) == said
    part = {"type": "refusal", "refusal": "No."}
    assert prompt({"role": "assistant", "content": [part]}) == said
    asked = {"messages": [{"role": "assistant", "content": [part]}, *CONTINUED], "max_tokens": 1}
    assert http.post(CHAT, asked).status == 200
    assert (
        http.post(CHAT, {**asked, "messages": [{"role": "user", "content": [part]}]}).status == 400
    )


def test_a_stream_lists_the_tokens_of_the_whole_answer(hermes):
    """Where the text has halves of characters, and control tokens that are not shown."""
    http = Http(hermes.url)
    listed = 0
    for seed in range(30):
        body = {
            "input": "a", "max_output_tokens": 8, "reasoning": {"effort": "none"},
            "include": ["message.output_text.logprobs"], "seed": seed,
        }  # fmt: skip
        events = data_of(lines_of(http.post(RESPONSES, {**body, "stream": True}).body))
        texts = []
        for whole in (http.post(RESPONSES, body).answer, events[-1]["response"]):
            output = whole["output"]
            said = [item["content"][0] for item in output if item["type"] == "message"]
            texts.append([(one["text"], one["logprobs"]) for one in said])
        assert texts[0] == texts[1], seed
        for text, tokens in texts[0]:
            listed += len(tokens)
            assert all(token["bytes"] for token in tokens)
            said_bytes = b"".join(bytes(token["bytes"]) for token in tokens)
            assert text in said_bytes.decode(errors="replace")
    assert listed > 20


def test_a_stream_lists_tokens_where_calls_follow(hermes):
    """Tokens of a call are none of the text."""
    http = Http(hermes.url)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {
        "input": "a", "tools": tools, "tool_choice": "required", "max_output_tokens": 150,
        "reasoning": {"effort": "none"}, "include": ["message.output_text.logprobs"],
        "stream": True, "seed": 3,
    }  # fmt: skip
    events = data_of(lines_of(http.post(RESPONSES, body).body))
    assert any(e["type"] == "response.function_call_arguments.delta" for e in events)
    for event in events:
        if event["type"] == "response.output_text.done":
            said = b"".join(bytes(one["bytes"]) for one in event["logprobs"])
            assert event["text"].encode() in said
            assert b"tool_call" not in said


@pytest.mark.parametrize("streamed", [False, True])
def test_stored_items_are_referred_to(client, http, streamed):
    """As if the client had sent them: the model's and its own, in its order, stored as they are."""

    def ask(**fields: Any) -> Any:
        if not streamed:
            return client.responses.create(**PLAIN, **fields)
        *_, last = client.responses.create(**PLAIN, **fields, stream=True)
        return last.response

    first = ask(input="Why is the sky blue?")
    (sent,) = client.responses.input_items.list(first.id).data
    (said,) = first.output
    more = {"role": "user", "content": "And at night?"}
    second = ask(input=[{"type": "item_reference", "id": sent.id}, {"id": said.id}, more])
    asked = {"role": "user", "content": "Why is the sky blue?"}
    whole = ask(input=[asked, said.to_dict(), more], store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    references = [{"type": "item_reference", "id": item.id} for item in (sent, said)]
    counted = http.post("/v1/responses/input_tokens", {"input": [*references, more]}).json
    assert counted["input_tokens"] == whole.usage.input_tokens
    client.responses.delete(first.id)
    kept = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in kept[:2]] == [sent.id, said.id]
    assert kept[1].content[0].text == said.content[0].text
    third = ask(input=[*references, more])
    assert third.output_text == second.output_text


def test_items_that_are_not_stored_are_named(client, http):
    first = client.responses.create(input="Why?", **PLAIN)
    unstored = client.responses.create(input="Why?", **PLAIN, store=False)
    ids = [response.output[0].id for response in (first, unstored)]
    known, unknown = ({"type": "item_reference", "id": id} for id in ids)
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refused = http.post(path, {"input": [known, unknown]})
        assert (refused.status, refused.error["param"]) == (404, "input[1].id")
        assert refused.error["code"] == "item_not_found"
        assert ids[1] in refused.error["message"]
        twice = http.post(path, {"input": [known, known]})
        assert (twice.status, twice.error["param"]) == (400, "input[1].id")
    client.responses.delete(first.id)
    assert http.post("/v1/responses", {"input": [known]}).status == 404
