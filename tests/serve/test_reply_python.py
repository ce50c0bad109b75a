"""Calls in Python as LFM 2 writes them, in any two pieces; what is none of them is text."""

import json
from typing import Any

import pytest

from harness.host.dialect import Dialect
from harness.host.dialect.calls import CallSyntax, Function
from harness.host.dialect.python_calls import LlamaCalls, PythonAnswer, PythonCalls
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.reply_parts import CallArguments
from tests.serve.test_reply import LISTED, read

BAD_PYTHON = (
    *("", "[]", "[rm()]", "[get_weather]", "[get_weather('Oslo')]", "[get_weather(city=Oslo)]"),
    *("[get_weather(city=1, city=2)]", "[get_weather(city='Oslo'", "[get_weather(days=01)]"),
    *("[get_weather(days=1e999)]", "[get_weather(where={1: 2})]", "[get_weather() get_weather()]"),
    *("[get_weather()] and more", f"[get_weather(days={'1' * 5000})]"),
    f"[get_weather(places={'[' * 2000}{']' * 2000})]",
    "[get_weather(city=f'{x}')]",
    "[get_weather(days=1 + 1)]",
)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("[get_weather(city='Oslo', days=3)]", {"city": "Oslo", "days": 3}),
        ('get_weather(city = "Oslo")', {"city": "Oslo"}),
        ("[get_weather(note=None, exact=True)]", {"note": None, "exact": True}),
        ("[get_weather(note=null, exact=false)]", {"note": None, "exact": False}),
        ("[get_weather(city='it's', note='a, b')]", {"city": "it's", "note": "a, b"}),
        (r"[get_weather(city='it\'s \"\n\x41\u00e9\q')]", {"city": 'it\'s "\nAé\\q'}),
        (r"[get_weather(city='\ud83d\ude00')]", {"city": "\U0001f600"}),
        (r"[get_weather(city='\ud83d')]", {"city": "\ufffd"}),
        ("[get_weather(places=['a', \"b\"], where={'x': -1.5e3})]", {
            "places": ["a", "b"], "where": {"x": -1500.0},
        }),
        ("[get_weather(city='<|tool_call_end|>')]", {"city": "<|tool_call_end|>"}),
        ('[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', {"city": "Oslo"}),
        ("[get_weather()]", {}),
    ],
)  # fmt: skip
def test_python_and_json_between_the_marks_of_lfm2(body, arguments):
    """Whole and cut at every place."""
    text = f"so:<|tool_call_start|>{body}<|tool_call_end|>"
    for pieces in ([text], *([text[:n], text[n:]] for n in range(len(text))), list(text)):
        reasoning, content, calls = read(PythonCalls(), pieces)
        assert (reasoning, content) == ("", "so:")
        assert [(name, json.loads(given)) for name, given in calls] == [("get_weather", arguments)]


@pytest.mark.parametrize("body", BAD_PYTHON)
def test_what_is_no_call_is_text(body):
    """Whole and cut at every place, as far as that does not take too long."""
    text = f"so: \n<|tool_call_start|>{body}<|tool_call_end|> "
    pairs = ([text[:n], text[n:]] for n in range(min(len(text), 200)))
    for pieces in ([text], *pairs):
        assert read(PythonCalls(), pieces) == ("", text, [])


def test_half_of_a_pair_of_surrogates_can_be_sent():
    text = '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "\\ud83d"}}]</TOOLCALL>'
    ((_, arguments),) = read(LISTED, [text])[2]
    assert json.loads(arguments.encode().decode()) == {"city": "\ud83d"}


@pytest.mark.parametrize("syntax", [LlamaCalls(), PythonAnswer()])
def test_a_value_of_many_lists_is_parsed_once(syntax, monkeypatch):
    """Each of its brackets could end the calls: to parse there takes the square of its length."""
    parsed: list[str] = []
    parse = type(syntax).parse

    def counted(syntax: CallSyntax, body: str, functions: Any) -> Any:
        parsed.append(body)
        return parse(syntax, body, functions)

    monkeypatch.setattr(type(syntax), "parse", counted)
    parser = ReplyParser(ReplyForm(Dialect(syntax), {"f": Function("f")}))
    rows = [[number, -number] for number in range(40)]
    text = f'[f(a={rows}, b="it\'s ]")]'
    parts = [part for at in range(0, len(text), 3) for part in parser.feed(text[at : at + 3])]
    parts += parser.finish()
    assert [part.text for part in parts if isinstance(part, CallArguments)] == [
        json.dumps({"a": rows, "b": "it's ]"})
    ]
    assert len(parsed) == 1
