"""Answers have the types of Anthropic's client, which builds its objects without checking them: a
field that is missing or of another type fails only where a program reads it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from harness.serve.anthropic.render import error_body
from harness.serve.errors import ApiError
from tests.late_module import LateModule
from tests.serve.http import Http
from tests.serve.test_anthropic_client import ASKED, CALLING, MESSAGES_PATH, anthropic

types, shared = LateModule("anthropic.types"), LateModule("anthropic.types.shared")
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
TURN: dict[str, Any] = {"model": "tiny", "messages": ASKED["messages"]}


def check(kind: Any, answer: Any) -> None:
    """Raises ValidationError unless ``answer`` is of the type."""
    TypeAdapter(kind).validate_python(answer)


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"stop_sequences": ["a", "e"]},
    ],
    ids=["calls", "thinking", "stop"],
)
def test_messages_and_events(hermes, more):
    http = Http(hermes.url)
    body = {name: value for name, value in CALLING.items() if name != "extra_body"} | more
    check(types.Message, http.post(MESSAGES_PATH, body).answer)
    stream = http.post(MESSAGES_PATH, {**body, "stream": True}).body.split(b"\n\n")
    data = [json.loads(event.partition(b"data: ")[2]) for event in stream if event]
    events = [event for event in data if event["type"] != "ping"]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    for event in events:
        check(types.RawMessageStreamEvent, event)
    with pytest.raises(ValidationError):
        check(types.RawMessageStreamEvent, {**events[0], "type": "ping"})
    check(types.MessageTokensCount, http.post(COUNT_PATH, TURN).answer)


def test_models_are_active(serve, synthetic_model):
    """The active one, one that is loaded on demand, and those that could be pulled."""
    with serve(beside={"llama": synthetic_model(architecture="llama", quant="q8_0")}) as server:
        http = Http(server.url)
        listed = http.get("/v1/models").json
        managed = [facts["id"] for facts in listed["x_zinc"]["managed"]]
        cards = [http.get(f"/v1/models/{name}").json for name in ("tiny", "llama", *managed)]
    assert len(cards) > 3
    for card in (*listed["data"], *cards):
        check(types.ModelInfo, card)
        assert card["lifecycle"] == "active"


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda client: client.messages.create(**{**ASKED, "model": "claude-9"}), "model_not_found"),
    (lambda client: client.messages.create(**{**ASKED, "max_tokens": 0}), "invalid_value"),
    (
        lambda client: client.messages.create(
            **{**ASKED, "messages": [{"role": "user", "content": "ab" * 4096}]}
        ),
        "context_length_exceeded",
    ),
    (
        lambda client: client.messages.count_tokens(**{**TURN, "model": "claude-9"}),
        "model_not_found",
    ),
    (lambda client: client.get(f"{MESSAGES_PATH}/batches", cast_to=object), "not_found"),
    (lambda client: client.get(MESSAGES_PATH, cast_to=object), "method_not_allowed"),
]


@pytest.mark.parametrize(("ask", "code"), REFUSED, ids=[code for _, code in REFUSED])
def test_an_error_names_its_cause(server, ask, code):
    """Where the client reads it, and in the field that it had before."""
    url = server.url
    with (
        anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError) as refused,
    ):
        ask(client)
    assert refused.value.error_code == code
    assert refused.value.body["error"]["code"] == code
    check(shared.ErrorResponse, refused.value.body)


def test_an_error_without_a_code_has_no_details():
    """The client then knows the type alone."""
    body = json.loads(error_body(ApiError(403, "no")))
    check(shared.ErrorResponse, body)
    assert "details" not in body["error"]
