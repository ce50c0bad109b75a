"""Tools on models whose chat template knows none, and templates on a server that serves any."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from harness.host.harmony_reply import content_of, reply_parser
from harness.host.reply_parts import CallBegin
from harness.serve.run import Running
from harness.serve.wire import ChatRequest, converted
from tests.serve.calling import (
    ASKED,
    CALLING,
    MESSAGES,
    PARAMETERS,
    TIME,
    TOOLS,
    WEATHER,
    check_call,
    token_of,
)
from tests.serve.http import Http
from tests.serve.speaking_models import CONTEXT, templated_model
from tests.serve.streams import data_of, lines_of

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Gemma 2's: no system message, and turns that alternate."""
PLAIN = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNKNOWN_SYNTAX = PLAIN + "{# tools #}"
TEMPLATES = {"alternating": ALTERNATING, "plain": PLAIN, "unknown syntax": UNKNOWN_SYNTAX}


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request, serve, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("generic")
    marks = ("<tool_call>", "</tool_call>")
    path = templated_model(folder, "generic", TEMPLATES[request.param], marks)
    with serve(path=path, context=CONTEXT) as running:
        yield running


def prompt_of(http: Http, messages: list[dict[str, Any]], **more: Any) -> str:
    answer = http.post("/apply-template", {"messages": messages, **more}).answer
    prompt: str = answer["prompt"]
    return prompt


def test_tools_are_described(http):
    """Each with its name, description and parameters; not at all without tools."""
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    prompt = prompt_of(http, MESSAGES, tools=TOOLS)
    for tool in (WEATHER, TIME):
        assert json.dumps(tool) in prompt
    assert "<tool_call>" in prompt
    assert prompt.count("How warm is it?") == 1
    assert "<tool_call>" not in prompt_of(http, MESSAGES)
    if "<system>" in prompt:
        assert prompt.index("<tool_call>") < prompt.index("<user>")
        both = prompt_of(http, system, tools=TOOLS)
        assert both.startswith("<system>Be brief.\n\n# Tools")
        assert both.count("<system>") == 1


def test_a_system_message_reaches_the_model(http):
    """By way of the user where the template takes none; whole and streamed, and counted once."""
    system = {"role": "system", "content": "Be brief."}
    prompt = prompt_of(http, [system, *MESSAGES])
    assert prompt.count("Be brief.") == 1
    if "<system>" not in prompt:
        joined = {"role": "user", "content": f"Be brief.\n\n{MESSAGES[0]['content']}"}
        assert prompt == prompt_of(http, [joined])
        described = prompt_of(http, [system, *MESSAGES], tools=TOOLS)
        assert described.startswith("<user>Be brief.\n\n# Tools")
        assert described.count("<user>") == 1
    body = {"model": "tiny", "messages": [system, *MESSAGES], "max_tokens": 9, "seed": 3}
    whole = http.post("/v1/chat/completions", body).answer
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = data_of(lines_of(http.post("/v1/chat/completions", body | more).body))
    said = [choice["delta"].get("content") or "" for one in chunks for choice in one["choices"]]
    assert "".join(said) == (whole["choices"][0]["message"]["content"] or "")
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    asked = {"model": "tiny", "system": "Be brief.", "messages": MESSAGES}
    counted = http.post("/v1/messages/count_tokens", asked).answer
    assert counted["input_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_required_call_obeys_its_schema(client):
    answer = client.chat.completions.create(**CALLING, seed=1)
    (choice,) = answer.choices
    assert answer.x_zinc["tools"] == "described"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)


def test_a_required_call_is_one_unless_several_are_asked_for(client):
    """Random weights go on calling, as weak models do. Where the model decides, it may."""
    asked = {**CALLING, "max_tokens": 120, "tools": [{"type": "function", "function": TIME}]}
    del asked["parallel_tool_calls"]
    for seed in range(8):
        several = client.chat.completions.create(**asked, parallel_tool_calls=True, seed=seed)
        calls = several.choices[0].message.tool_calls
        if len(calls) > 1:
            break
    assert len(calls) > 1
    choice = client.chat.completions.create(**asked, seed=seed).choices[0]
    assert choice.message.tool_calls == calls[:1]
    assert choice.finish_reason == "tool_calls"


def test_a_response_says_whether_several_calls_were_allowed(client):
    tools = [{"type": "function", "name": TIME["name"], "parameters": TIME["parameters"]}]
    asked = {"model": "tiny", "input": "a", "max_output_tokens": 40, "tools": tools}
    for choice, given, allowed in (
        ("required", None, False), ("required", True, True), ("auto", None, True),
        ("auto", False, False),
    ):  # fmt: skip
        more = {} if given is None else {"parallel_tool_calls": given}
        response = client.responses.create(**asked, tool_choice=choice, **more)
        assert response.parallel_tool_calls is allowed
        with client.responses.stream(**asked, tool_choice=choice, **more) as events:
            first = next(iter(events))
        assert first.response.parallel_tool_calls is allowed


def test_a_call_the_model_decides_on_is_held_by_the_grammar(server, client):
    """Though nothing is strict: a bias makes it begin calls, and the grammar makes them whole."""
    bias = {token_of(server, "<tool_call>"): 7}
    asked = {**ASKED, "max_tokens": 100, "logit_bias": bias, "seed": 1}
    tools = [{"type": "function", "function": TIME}]
    first, *_ = client.chat.completions.create(**asked, tools=tools).choices[0].message.tool_calls
    check_call(first.function.name, first.function.arguments)
    # The control: without tools the mark is text.
    plain = client.chat.completions.create(**asked).choices[0].message
    assert plain.tool_calls is None
    assert "<tool_call>" in plain.content


def test_parameters_no_grammar_holds_are_any_object_unless_strict(http):
    odd = {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}
    for strict, status in ((False, 200), (True, 400)):
        tool = {"type": "function", "function": {**odd, "strict": strict}}
        reply = http.post("/v1/chat/completions", {**ASKED, "max_tokens": 4, "tools": [tool]})
        assert reply.status == status
        if strict:
            assert reply.error["code"] == "unsupported_schema"


def test_calls_and_results_are_told_as_text(http):
    """Results and what follows them are one turn of the user: roles go on alternating."""
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "get_time", "arguments": text}}
        for n, text in enumerate(("", '{"zone": "UTC"}'))
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "call_0", "content": "two"},
    ]
    for tools in (TOOLS, None):
        prompt = prompt_of(http, turns, **({} if tools is None else {"tools": tools}))
        said = prompt.split("How warm is it?")[1]
        assert said == (
            "</user>\n<assistant>Let me see.\n"
            '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
            "</assistant>\n<user><tool_response>\nnoon\n</tool_response>\n"
            "<tool_response>\none\n</tool_response>\nAnd?</user>\n"
            '<assistant><tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
            "</assistant>\n<user><tool_response>\ntwo\n</tool_response></user>\n<assistant>"
        )


@pytest.mark.parametrize("most", [1, 2, 14, 30])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_is_cut_has_no_content(http, most, stream):
    body = {**CALLING, "seed": 1, "max_completion_tokens": most, "stream": stream}
    del body["max_tokens"]
    reply = http.post("/v1/chat/completions", body)
    if stream:
        chunks = data_of(lines_of(reply.body))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert not any(choice["delta"].get("content") for choice in choices)
        assert choices[-1]["finish_reason"] == "length"
        return
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]


def test_the_schema_of_each_tool_is_enforced(http):
    for name in PARAMETERS:
        chosen = {"type": "function", "function": {"name": name}}
        body = {**CALLING, "tool_choice": chosen, "seed": 2}
        (call,) = http.post("/v1/chat/completions", body).json["choices"][0]["message"][
            "tool_calls"
        ]
        assert call["function"]["name"] == name
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS[name])


def test_a_refusal_has_the_templates_own_words(serve, tmp_path, caplog):
    """And a broken template is named with its line, in the log alone and without the messages."""
    path = templated_model(tmp_path, "alternating", ALTERNATING)
    twice = {"messages": [*MESSAGES, {"role": "user", "content": "SECRET"}], "max_tokens": 1}
    with serve(path=path, context=CONTEXT) as server:
        for route in ("/v1/chat/completions", "/apply-template"):
            body = twice if "chat" in route else {"messages": twice["messages"]}
            reply = Http(server.url).post(route, body)
            assert (reply.status, reply.error["code"]) == (400, "template_refused")
            assert "roles must alternate: user" in reply.error["message"]
        assert "SECRET" not in caplog.text
    broken = {
        "\n\n{% frobnicate %}": "line 3: syntax error: .*frobnicate",
        "a\n{{ messages[0].content + 3 }}": "line 2: TypeError",
        "\n{{ 'x'.format(*messages[0].content) }}{{ 1 // 0 }}": "line 2: ZeroDivisionError",
    }
    for number, (template, words) in enumerate(broken.items()):
        path = templated_model(tmp_path, f"broken{number}", template)
        caplog.clear()
        with serve(path=path, context=CONTEXT) as server:
            reply = Http(server.url).post("/v1/chat/completions", {**twice})
            assert (reply.status, reply.error["code"]) == (400, "template_broken")
            assert str(path) not in reply.error["message"]
        assert any(
            record.levelname == "ERROR" and named(record.getMessage(), words)
            for record in caplog.records
        ), caplog.text
        assert "SECRET" not in caplog.text


def named(message: str, words: str) -> bool:
    """Whether a line of the log names the template and says ``words``."""
    return re.search(f"gguf: chat template {words}", message) is not None


def test_the_other_template_of_a_file_is_for_tools(serve, tmp_path):
    """Which shows how calls are written, too."""
    other = (
        "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}"
        "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n"
        "</tool_call>{% endfor %}{% endfor %}"
    )
    path = templated_model(tmp_path, "two", PLAIN, **{"tokenizer.chat_template.tool_use": other})
    with serve(path=path, context=CONTEXT) as server:
        http = Http(server.url)
        assert prompt_of(http, MESSAGES, tools=TOOLS).startswith("TOOLS [")
        assert prompt_of(http, MESSAGES).startswith("<user>How warm")
        (call,) = http.post("/v1/chat/completions", {**CALLING, "seed": 1}).json["choices"][0][
            "message"
        ]["tool_calls"]
        check_call(call["function"]["name"], call["function"]["arguments"])


@pytest.mark.parametrize("strict", [False, True])
def test_fenced_calls_are_read_unless_a_tool_is_strict(server, strict):
    """The grammar of an answer holds no fenced call to its schema."""
    tools = [{"type": "function", "function": {**WEATHER, "strict": strict}}]
    body = converted({"messages": MESSAGES, "tools": tools}, ChatRequest)
    parser = reply_parser(server.service.model.chat_plan(body).form)
    text = '```json\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n```'
    parts = [*parser.feed(text), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, CallBegin)] == (
        [] if strict else ["get_weather"]
    )
    assert content_of(parts) == (text if strict else "")
