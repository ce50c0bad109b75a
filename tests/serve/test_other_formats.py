"""Forms of an answer as vLLM and llama.cpp name them: the same answers as by this server's own
fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.serve.run import Running
from tests.serve.http import Http

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
def test_every_way_to_say_a_form_means_the_same(hermes: Running, path: str) -> None:
    for own, others in SAME:
        expected = said(hermes, path, own)
        for other in others:
            assert said(hermes, path, other) == expected, other
    assert json.loads(said(hermes, path, {"guided_json": SCHEMA}))["city"] in ("Oslo", "Rome")
    assert said(hermes, path, {"guided_choice": WORDS}) in WORDS


@pytest.mark.parametrize(("fields", "param", "says"), [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "contradict"),
    ({"json_schema": SCHEMA, "grammar": QUOTED}, "json_schema", "contradict"),
    ({"structured_outputs": {"regex": "a"}, "response_format": NAMED}, None, "contradict"),
    ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "one of"),
    ({"structured_outputs": [1]}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
     "structured_outputs.whitespace_pattern", "not served"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "texts"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "texts"),
    ({"guided_json": {"const": 2**53 + 1}}, "response_format", "const"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_regex": "("}, "response_format", "cannot be"),
    ({"guided_grammar": "root ::= ("}, "grammar", "grammar"),
    ({"min_tokens": 9999}, "min_tokens", "max_tokens"),
    ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"response_format": {"type": "json_object", "schema": 3}}, None, "schema"),
], ids=lambda value: json.dumps(value)[:50])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_not_served_is_named(
    hermes: Running, path: str, fields: dict[str, Any], param: str | None, says: str
) -> None:
    reply = Http(hermes.url).post(path, ASKED[path] | fields)
    assert reply.status == 400, reply.body
    assert says in reply.error["message"]
    if param is not None:
        assert reply.error["param"] == param
