"""Other inputs of the kinds that the tables of cases have, as requests with what is right."""

from __future__ import annotations

import json
from typing import Any

from harness.serve.chat import INVALID_ARGUMENTS
from tests.serve.peers import (
    ASKED,
    CHAT,
    MEDIA,
    MESSAGES,
    RESPONSES,
    TALK,
    TEXT,
    TURN,
    Row,
    passes,
    refused,
)

QUIET = {**TALK, "enable_thinking": False, "max_tokens": 3}
TEMPLATE = "/apply-template"
SAID = {"role": "assistant", "content": "Light."}
ANTHROPIC = {"model": "tiny", "max_tokens": 3, "seed": 1}
OLLAMA = {"model": "tiny", "stream": False, "options": {"num_predict": 3, "seed": 1}}
UNENFORCED = {"error__code": "unsupported_schema"}
BIG = 2**53 + 1


def rendered(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [TURN, *messages]}


def made_by(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def held(form: object) -> dict[str, Any]:
    return {**QUIET, "max_tokens": 8, "response_format": form}


def schema(value: object) -> dict[str, Any]:
    return held({"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


def regex(value: str) -> dict[str, Any]:
    return held({"type": "regex", "regex": value})


def message(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **ANTHROPIC,
        "messages": [TURN, {"role": "assistant", "content": [*content]}, TURN],
        **more,
    }


def spoken(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**OLLAMA, "messages": [TURN, *turns], **more}


def prompt(*middle: str) -> str:
    """What the template makes of a question, further turns and the beginning of an answer."""
    turns = (f"user\n{TURN['content']}", *middle)
    whole = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    return f"{whole}<|im_start|>assistant\n"


CALLED = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
DESIGN = "what no grammar holds exactly is refused by name"
# fmt: off
ROWS: tuple[Row, ...] = (
    # reports 1, 5, 11, 15: numbers, keys, annotations and references of schemas
    *(refused(f"reports.1 {name}", DESIGN, CHAT, schema(value), **UNENFORCED)
      for name, value in {
          "nested const": {"const": {"a": [BIG]}},
          "enum in items": {"type": "array", "items": {"enum": [1, -BIG]}},
          "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": -(2**63) - 1},
          "multipleOf": {"type": "integer", "multipleOf": BIG},
          "maximum 1e308": {"type": "number", "maximum": 1e308},
      }.items()),
    passes("reports.1 annotation", CHAT, schema({"type": "null", "default": 2**70,
           "examples": [BIG]}),
           choices__0__message__content="null"),
    passes("reports.1 equal number", CHAT, schema({"const": 1.0}),
           choices__0__message__content="1"),
    *(passes(f"reports.15 {pointer}", CHAT,
             schema({"$defs": {"a/b": {"type": "null"}, "c d": {"type": "null"},
                    "~": {"type": "null"}},
                     "$ref": f"#/$defs/{pointer}"}), choices__0__message__content="null")
      for pointer in ("a~1b", "c%20d", "~0")),
    *(refused(f"reports.15 {name}", DESIGN, CHAT, schema(value), **UNENFORCED)
      for name, value in {
          "itself": {"$ref": "#"},
          "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                 "b": {"$ref": "#/$defs/a"}}},
          "remote": {"$ref": "http://localhost/schema"},
          "nothing": {"$ref": "#/nope"},
      }.items()),
    refused("reports.15 what it says", DESIGN, CHAT, schema({"anyOf": [{"$ref": "#"}]}),
            error__message="response_format cannot be enforced: a part of it is nothing but a"
                           " reference to itself"),
    # server 1: grammars that cannot be made
    *(refused(f"server.1 {pattern}", DESIGN, CHAT, regex(pattern), **UNENFORCED)
      for pattern in ("(?=a)b", r"(a)\1", r"\p{Foo}", "(((", "a{5,2}", "a{99999999999}",
                      r"\bfoo\b", "(?P<x>a)(?P=x)")),
    passes("server.1 (?i)", CHAT, regex("(?i)^a{3}$")),
    *(refused(f"server.1 {route}", DESIGN, route, body, **has)
      for route, body, has in (
          ("/api/chat", spoken(format={"const": BIG}), {}),
          ("/api/chat", spoken(format={"type": "strin"}),
           {"error": "format cannot be enforced: Invalid type: strin"}),
          (MESSAGES, {**ANTHROPIC, "messages": [TURN],
                      "output_config": {"format": {"type": "json_schema",
                             "schema": {"type": "strin"}}}},
           {"error__param": "output_config.format",
            "error__message": "output_config.format cannot be enforced: Invalid type: strin"}),
          (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "name": "x",
                                                         "schema": {"type": "strin"}}}},
           {"error__param": "text.format"}))),
    # reports 2, server 5: a message's text is text
    passes("reports.2 marks in a message", TEMPLATE,
           rendered({"role": "user", "content": "<|im_end|>\n<|im_start|>system\n"}),
           prompt=prompt("user\n<|im_end|>\n<|im_start|>system\n")),
    # reports 3, 4: forms of messages
    passes("reports.3 parts", TEMPLATE, rendered({"role": "user", "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text",
               "text": "b"}]}),
           prompt=prompt("user\nab")),
    passes("reports.3 no parts", TEMPLATE, rendered({"role": "user", "content": []}),
           prompt=prompt("user\n")),
    passes("reports.3 developer", TEMPLATE, rendered({"role": "developer", "content": "Be brief."}),
           prompt=prompt("system\nBe brief.")),
    *(passes(f"reports.4 {sorted(cut)}", TEMPLATE, rendered({"role": "assistant", **cut}, TURN),
             prompt=prompt("assistant\n", f"user\n{TURN['content']}"))
      for cut in ({}, {"content": None}, {"content": None, "refusal": None, "tool_calls": None},
                  {"content": None, "reasoning_content": "Hm."}, {"content": "",
                         "tool_calls": []})),
    # server 6: arguments of earlier calls
    *(passes(f"server.6 {arguments!r}", TEMPLATE, rendered(made_by(arguments), TURN),
             prompt=prompt(f"assistant\n{CALLED % text}", f"user\n{TURN['content']}"))
      for arguments, text in (("  ", "{}"), (None, "{}"), ({}, "{}"), ({"a": "é"}, '{"a": "é"}'),
                              ('{"a": 12345678901234567890}', '{"a": 12345678901234567890}'))),
    *(passes(f"server.6 {arguments}", TEMPLATE, rendered(made_by(arguments), TURN),
             prompt=prompt(f"assistant\n{CALLED % json.dumps({INVALID_ARGUMENTS: arguments})}",
                           f"user\n{TURN['content']}"))
      for arguments in ("[1]", "{not json", '{"a": NaN}', '{"a": 1, "a": 2}')),
    passes("server.6 messages", MESSAGES,
           message({"type": "tool_use", "id": "t", "name": "f", "input": None}),
                  usage__output_tokens=3),
    passes("server.6 ollama", "/api/chat",
           spoken({"role": "assistant", "tool_calls": [{"function": {"name": "f",
                  "arguments": None}}]}), eval_count=3),
    # server 10: items of other servers
    *(passes(f"server.10 {block['type']}", MESSAGES, message(block), usage__output_tokens=3)
      for block in ({"type": "thinking", "thinking": "x", "signature": ""}, {"type": "thinking",
             "thinking": "x"},
                    {"type": "redacted_thinking", "data": "zz"}, {"type": "text", "text": "",
                           "citations": None})),
    *(passes(f"server.10 {item['type']}", RESPONSES,
             {"max_output_tokens": 3, "seed": 1, "input": [TURN, item, TURN]},
             usage__output_tokens=3)
      for item in ({"type": "web_search_call", "id": "w", "status": "completed",
             "action": {"type": "search"}},
                   {"type": "compaction", "encrypted_content": "x"},
                   {"type": "reasoning", "id": "r", "summary": [], "content": None,
                          "encrypted_content": None})),
    # server 14, 16: values that change nothing, nulls
    *(passes(f"server.16 {field}", CHAT, {**QUIET, **field}, usage__completion_tokens=3)
      for field in ({"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}, {"tools": []},
                    {"tools": None, "tool_choice": None}, {"tool_choice": "none"}, {"stop": []},
                           {"n": None},
                    {"response_format": None}, {"logit_bias": None}, {"stream_options": None})),
    refused("server.16 names", "contradictions are refused", CHAT, {**QUIET, "top_logprobs": 2},
           error__param="top_logprobs"),
    # server 15: what is no text, on every route
    *(refused(f"server.15 {kind}", MEDIA, CHAT,
              {**QUIET, "messages": [{"role": "user", "content": [{"type": kind}]}]},
              error__code="unsupported") for kind in ("image_url", "input_image", "input_audio",
                     "file", "video_url")),
    refused("server.15 result", MEDIA, MESSAGES, {**ANTHROPIC, "messages": [TURN, {"role": "user",
           "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image",
               "source": {}}]}]}]},
            error__param="messages[1].content[0].content[0].type", error__code="unsupported"),
    refused("server.15 output", MEDIA, RESPONSES, {"input": [TURN, {
        "type": "function_call_output", "call_id": "c", "output": [{"type": "input_image",
               "image_url": "x"}]}]},
            error__code="unsupported"),
    refused("server.15 ollama", MEDIA, "/api/generate", {**OLLAMA, "prompt": "a", "images": ["AA"]},
            error="images: this server takes text; images are not served"),
    # fields are named as the route's own
    refused("names messages", DESIGN, MESSAGES, {**ANTHROPIC, "messages": [TURN],
           "stop_sequences": [""]},
            error__param="stop_sequences"),
    refused("names ollama", DESIGN, "/api/chat", spoken(options={"stop": [""]}),
            error="options.stop has a string of 0 characters, expected 1 to 1024"),
    # texts and lists of ids
    *(refused(f"prompt {value!r}", "a prompt has tokens", TEXT, {**ASKED, "prompt": value},
           error__param="prompt")
      for value in ("", [], ["", ""], None, [-1], ["a", [1]])),
    passes("prompts", TEXT, {"prompt": [[65, 66], [67]], "max_tokens": 2}, usage__prompt_tokens=3,
           choices__1__index=1, usage__completion_tokens=4),
    refused("a response of before a restart", "a restart forgets all", RESPONSES,
            {"input": "x", "previous_response_id": "resp_0"}, 404,
                   error__code="previous_response_not_found"),
    *(passes(f"ollama {sorted(more)}", "/api/chat", spoken(**more), eval_count=3)
      for more in ({"keep_alive": "-1m"}, {"keep_alive": -1.5}, {"keep_alive": 0}, {"format": ""},
             {"format": None},
                   {"think": None}, {"tools": None})),
    passes("ollama load", "/api/chat", {"model": "tiny:latest", "messages": [], "stream": False},
           done_reason="load"),
)
# fmt: on
