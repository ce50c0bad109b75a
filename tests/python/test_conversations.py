"""Tools and formats in a Python program: what the server answers, to the bit."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ZincError
from tests.refused_processes import REFUSAL, refuse_grammars
from tests.serve.calling import ENUM, MESSAGES, TIME, TOOLS, check_call
from tests.serve.speaking_models import HERMES, speaking_model, templated_model
from zinc_rt import LLM, RequestError, SamplingParams, serve

CONTEXT = 1024
ASKED: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0,
    "max_tokens": 120,
}  # fmt: skip
CALLING: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENUM}}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("speaking"), HERMES)


@pytest.fixture(scope="module")
def talking(path) -> Iterator[LLM]:
    with LLM(path, tier="native", context=CONTEXT, slots=2, progress=False) as opened:
        yield opened


def asked(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, **(ASKED | more))


def test_a_call_is_the_one_that_the_server_makes(talking, path, tmp_path):
    """The whole message, ids included; it and the answer to it go back into the conversation."""
    (output,) = talking.chat(MESSAGES, asked(3), thinking=False, **CALLING)
    message, completion = output.completion.message, output.completion
    assert message is not None
    assert completion.finish_reason == "tool_calls"
    (call,) = message["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])
    wire = {"messages": MESSAGES, "seed": 3, "max_tokens": 120, "enable_thinking": False}
    wire |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    body = json.dumps({**wire, **CALLING}).encode()
    ledger = tmp_path / "ledger.sqlite"
    with serve(path, tier="native", context=CONTEXT, port=0, ledger=ledger) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            (choice,) = json.load(response)["choices"]
    assert choice["message"] == message
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    (after,) = talking.chat([*MESSAGES, message, answer], asked(3, max_tokens=2), tools=TOOLS)
    assert after.error is None
    assert after.completion.message is not None
    assert len(after.prompt_tokens) > len(output.prompt_tokens)


def test_formats_of_many_choices_of_many_conversations(talking):
    """Beside one that is free, and in a stream."""
    outputs = talking.chat([MESSAGES] * 3, asked(5, n=2), thinking=False, response_format=SCHEMA)
    texts = [completion.text for output in outputs for completion in output.completions]
    assert all(json.loads(text) in ENUM["enum"] for text in texts)
    assert texts == texts[:2] * 3
    (message,) = {str(output.completion.message) for output in outputs}
    assert texts[0].replace('"', "") in message
    stream = talking.stream_chat(MESSAGES, asked(5), thinking=False, response_format=SCHEMA)
    assert "".join(piece.text for piece in stream) == texts[0]
    assert stream.output.completion.message == outputs[0].completion.message
    (free,) = talking.chat(MESSAGES, asked(5, max_tokens=4), thinking=False)
    assert free.completion.message is None
    assert free.text not in texts


def test_one_call_ends_an_answer(talking):
    """What a model would say after the only call it may make is never computed."""
    (begin,) = talking.tokenizer.encode("<tool_call>", add_bos=False)
    free = asked(3, max_tokens=400, logit_bias={begin: 100}, ignore_end=False)
    strict = [{"type": "function", "function": {**TIME, "strict": True}}]
    told: dict[str, Any] = {"thinking": False, "tools": strict, "parallel_tool_calls": False}
    stream = talking.stream_chat(MESSAGES, free, **told)
    text = "".join(piece.text for piece in stream)
    completion = stream.output.completion
    assert text.endswith("</tool_call>")
    assert completion.finish_reason == "tool_calls"
    assert completion.message is not None
    assert len(completion.message["tool_calls"]) == 1
    assert len(completion.tokens) < 100
    (whole,) = talking.chat(MESSAGES, free, **told)
    assert whole.completion.message == completion.message


@pytest.mark.parametrize(("fields", "field", "says"), [
    ({"tools": [TOOLS[0]] * 2}, "tools", "twice"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format", "cannot be"),
    ({"tools": [{"type": "function", "function": {**TIME, "parameters": {"not": {}}}}],
      "tool_choice": "required"},
     "tools", "not at its root"),
])  # fmt: skip
def test_what_cannot_be_done_is_an_error_of_its_conversation(talking, fields, field, says):
    (output,) = talking.chat(MESSAGES, asked(1), **fields)
    assert isinstance(output.error, RequestError)
    assert output.error.field == field
    assert says in output.error.problem
    with pytest.raises(RequestError, match=says):
        list(talking.stream_chat(MESSAGES, asked(1), **fields))


def test_a_model_whose_template_knows_no_tools_calls_them_too(tmp_path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    path = templated_model(tmp_path, "plain", template)
    with LLM(path, tier="native", context=CONTEXT, slots=1, progress=False) as opened:
        (output,) = opened.chat(MESSAGES, asked(1), **CALLING)
    message = output.completion.message
    assert message is not None
    (call,) = message["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])


def test_a_format_that_cannot_be_held_to_any_longer_is_the_requests_fault(talking):
    """Not the model's: its file is whole, and others' answers go on."""
    late = {"type": "regex", "regex": "[xy](a?){3000}a{3000}"}
    (output,) = talking.chat(MESSAGES, asked(1), thinking=False, response_format=late)
    assert isinstance(output.error, RequestError)
    assert output.error.field == "response_format"
    (fine,) = talking.chat(MESSAGES, asked(1), thinking=False, response_format=SCHEMA)
    assert fine.error is None


def test_a_process_that_the_system_refuses_is_no_fault_of_the_messages(talking, monkeypatch):
    """The words are plain, since there is no server whose log says more."""
    refuse_grammars(monkeypatch)
    unknown = {"type": "regex", "regex": "never asked before [0-9]{3}"}
    (output,) = talking.chat(MESSAGES, asked(1), thinking=False, response_format=unknown)
    assert not isinstance(output.error, RequestError)
    assert str(output.error) == f"grammars: {REFUSAL}"
    with pytest.raises(ZincError, match=r"^grammars: its process cannot be started"):
        list(talking.stream_chat(MESSAGES, asked(1), thinking=False, response_format=unknown))


def test_each_of_a_list_of_conversations_has_its_own_parameters(llm):
    """As prompts have; one of the wrong type is refused before any is computed."""
    asked = [SamplingParams(max_tokens=n) for n in (2, 5, 3)]
    turns = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    for conversations in (turns, ["a", "b", "c"], tuple(turns)):
        outputs = llm.chat(conversations, asked)
        assert [len(output.tokens) for output in outputs] == [2, 5, 3]
    with pytest.raises(RequestError, match="one for each of a list"):
        llm.chat(turns[:2], asked)
    with pytest.raises(TypeError, match="messages: 3 is of type int"):
        llm.chat([*turns[:2], 3], asked)


@pytest.mark.parametrize(
    "message",
    [
        *({"role": "user", "content": content} for content in (3, None, ["x"], {"type": "text"})),
        *({"role": role} for role in ("user", "system", "assistant")),
        {"role": "user", "text": "Hello"},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
    ids=repr,
)
def test_a_content_that_is_no_text_is_an_error_of_its_conversation(llm, message):
    bad, good = llm.chat([[message], "Hello"], SamplingParams(max_tokens=4))
    says = "expected a text or a list of"
    if "image_url" in str(message):
        says = "has a part of type 'image_url'; only text is understood"
    assert str(bad.error).startswith(f"messages[0].content: {says}")
    assert good.error is None
