"""Forms of an answer as vLLM and llama.cpp name them: the same answers as by this server's own
fields."""

import json
from typing import Any

import pytest

from harness.serve.run import Running
from tests.serve.http import Http
from tests.serve.streams import data_of, lines_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "Well?"}],
        "enable_thinking": False,
        "max_tokens": 60,
        "seed": 3,
    },
    TEXT: {"prompt": "Well?", "max_tokens": 60, "seed": 3},
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
WORDS = ['say "yes"', "no\\never\n"]
LATE = "[xy](a?){3000}a{3000}"
LATE_SCHEMA = {"type": "string", "pattern": f"^{LATE}$"}
THOUGHTLESS = {"enable_thinking": False, "max_tokens": 30, "seed": 1}
TURNS = [{"role": "user", "content": "Well?"}]
LATELY: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS, **THOUGHTLESS},
    TEXT: {"prompt": "Well?", "max_tokens": 30, "seed": 1},
    "/v1/messages": {"model": "tiny", "messages": TURNS, "max_tokens": 30, "seed": 1},
    "/v1/responses": {
        "input": "Well?", "max_output_tokens": 30, "seed": 1, "reasoning": {"effort": "none"},
    },
    "/api/generate": {
        "model": "tiny", "prompt": "Well?", "think": False,
        "options": {"num_predict": 30, "seed": 1},
    },
    "/completion": {"prompt": "Well?", "n_predict": 30, "seed": 1},
}  # fmt: skip
OPENAI, LLAMA_CPP = (CHAT, TEXT), "/completion"
FORMS: dict[str, tuple[object, tuple[str, ...]]] = {
    "response_format": ({"type": "json_object"}, OPENAI),
    "json_schema": (SCHEMA, (*OPENAI, LLAMA_CPP)),
    "grammar": ('root ::= "a"', (*OPENAI, LLAMA_CPP)),
    "structured_outputs": ({"regex": "a"}, OPENAI),
    "guided_json": (SCHEMA, OPENAI),
    "format": ("json", ("/api/generate",)),
    "output_format": ({"type": "json_schema", "schema": SCHEMA}, ("/v1/messages",)),
    "regex": ("a", ()),
    "ebnf": ('root ::= "a"', ()),
}
"""A form by its field, and the routes that have it."""
QUOTED = r'root ::= "say \"yes\"" | "no\\never\n"'
SAME: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"response_format": NAMED},
     [{"structured_outputs": {"json": SCHEMA}},
      {"structured_outputs": {"json": SCHEMA, "regex": None, "whitespace_pattern": None}},
      {"guided_json": SCHEMA}, {"json_schema": SCHEMA},
      {"response_format": {"type": "json_object", "schema": SCHEMA}},
      {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
      {"guided_json": SCHEMA, "response_format": {"type": "text"}},
      {"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}]),
    ({"response_format": {"type": "regex", "regex": "[ab]{3}"}},
     [{"structured_outputs": {"regex": "[ab]{3}"}}, {"guided_regex": "[ab]{3}"}]),
    ({"grammar": 'root ::= "a"{3}'},
     [{"structured_outputs": {"grammar": 'root ::= "a"{3}'}},
      {"guided_grammar": 'root ::= "a"{3}'}]),
    ({"grammar": QUOTED}, [{"structured_outputs": {"choice": WORDS}}, {"guided_choice": WORDS}]),
]  # fmt: skip


def said(server: Running, path: str, fields: dict[str, Any]) -> str:
    answer = Http(server.url).post(path, ASKED[path] | fields).answer
    assert "ignored" not in answer["x_zinc"]
    (choice,) = answer["choices"]
    text: str = choice["text"] if path == TEXT else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_way_to_say_a_form_means_the_same(hermes, path):
    for own, others in SAME:
        expected = said(hermes, path, own)
        for other in others:
            assert said(hermes, path, other) == expected, other
    assert json.loads(said(hermes, path, {"guided_json": SCHEMA}))["city"] in ("Oslo", "Rome")
    assert said(hermes, path, {"guided_choice": WORDS}) in WORDS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "name"), [
    (CHAT, {"guided_regex": LATE}, "guided_regex"),
    (TEXT, {"structured_outputs": {"regex": LATE}}, "structured_outputs.regex"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": LATE_SCHEMA}}},
     "output_config.format"),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": LATE_SCHEMA}},
     "output_format"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x",
                                           "schema": LATE_SCHEMA}}}, "text.format"),
    ("/api/generate", {"format": LATE_SCHEMA}, "format"),
    ("/completion", {"json_schema": LATE_SCHEMA}, "json_schema"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_a_form_that_fails_late_has_the_clients_name(hermes, path, fields, name, stream):
    reply = Http(hermes.url).post(path, LATELY[path] | fields | {"stream": stream})
    assert f"{name} cannot be held to any longer" in reply.body.decode(), reply.body
    assert "response_format" not in reply.body.decode()


@pytest.mark.parametrize("path", sorted(LATELY))
def test_no_form_is_left_out_without_a_word(hermes, path):
    """Of another API: an answer of any form is none of the form that was asked for."""
    for name, (form, routes) in FORMS.items():
        reply = Http(hermes.url).post(path, LATELY[path] | {name: form})
        if path in routes:
            assert reply.status == 200, (path, name, reply.body)
        else:
            assert reply.status == 400, (path, name)
            assert f"{name} is not served here" in reply.body.decode()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_takes_the_form_under_its_name_in_the_beta(hermes, stream):
    """As ``output_config.format``, beside the effort of ``output_config``, and not beside it."""
    http, form = Http(hermes.url), {"type": "json_schema", "schema": SCHEMA}
    asked = {**LATELY["/v1/messages"], "stream": stream}

    def said(**fields: Any) -> str:
        body = http.post("/v1/messages", asked | fields).body
        events = data_of(lines_of(body)) if stream else [{"delta": json.loads(body)["content"][0]}]
        return "".join(event.get("delta", {}).get("text", "") for event in events)

    asked["max_tokens"] = 90
    text = said(output_format=form)
    assert json.loads(text)["city"] in ("Oslo", "Rome")
    assert said(output_config={"format": form}) == text
    assert said(output_format=form, output_config={"effort": "low", "format": None}) == text
    both = http.post(
        "/v1/messages", asked | {"output_format": form, "output_config": {"format": form}}
    )
    assert both.status == 400
    assert both.json["error"]["param"] == "output_format"
    assert "contradict" in both.json["error"]["message"]
