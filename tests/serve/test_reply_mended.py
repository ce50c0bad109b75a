"""Answers of models that leave marks out, whose values hold calls, or whose thoughts never end."""

import json
from typing import Any

import pytest

from harness.host.dialect import REASONING, Dialect
from harness.host.dialect.calls import CallSyntax, Function, StringScanner
from harness.host.dialect.gemma_calls import GemmaCalls
from harness.host.dialect.json_calls import (
    BareJsonCall,
    JsonListCalls,
    JsonObjectCalls,
    KeyedJsonCalls,
    MistralCalls,
)
from harness.host.dialect.python_calls import PythonCalls
from harness.host.dialect.section_calls import SectionCalls
from harness.host.dialect.tagged_calls import GlmCalls, InvokeCalls
from harness.host.dialect.xml_calls import XmlCalls
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.reply_parts import ReasoningText
from tests.serve.test_reply import HERMES, SYNTAXES, read

WRITE = {
    "write": Function(
        "write", {"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
    ),
    "free": Function("free"),
}
WRITTEN_CALL = {"path": "a.txt", "content": "hi"}
HEAD = "<function=write>\n<parameter=path>\na.txt\n"
REST = "<parameter=content>\nhi\n"


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{HEAD}</parameter>\n{REST}</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n{HEAD}{REST}</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n{HEAD}{REST}</function>\n</tool_call>",
        f"<tool_call>\n{HEAD}</parameter>\n{REST}</parameter>\n</tool_call>",
        f"<tool_call>\n{HEAD}{REST}</tool_call>",
        f"<tool_call>\n{HEAD}{REST}</parameter>\n</function>",
        f"<tool_call>\n{HEAD}{REST}</parameter>",
        f"<tool_call>\n{HEAD}{REST}",
        f"<tool_call>{HEAD}{REST}</parameter></function></tool_call>",
        "<tool_call><function=write><parameter=path>a.txt<parameter=content>hi</function></tool_call>",
        f"{HEAD}</parameter>\n{REST}</parameter>\n</function>\n</tool_call>",
        f"{HEAD}{REST}</parameter>\n</function>\n</tool_call>",
        f"{HEAD}{REST}</parameter>\n</function>",
        f"{HEAD}{REST}</function>",
    ],
)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_tagged_call_is_read_with_tags_missing(text, pieces):
    """The closing ones of a value, of the function and of the call, and the opening one."""
    for before, after in (("", ""), ("So:\n", ""), ("", "\nDone.")):
        if after and not text.rstrip().endswith(("</tool_call>", "</function>")):
            continue
        if after and text.startswith("<tool_call>") and not text.endswith("</tool_call>"):
            continue
        whole = before + text + after
        _, content, calls = read(XmlCalls(), list(whole) if pieces else [whole], functions=WRITE)
        assert [(name, json.loads(text)) for name, text in calls] == [("write", WRITTEN_CALL)]
        assert content.strip() == (before + after).strip()


JSON = '{"name": "write", "arguments": {"path": "a.txt", "content": "hi"}}'
XML = f"{HEAD}</parameter>\n{REST}</parameter>\n</function>"
GEMMA = 'call:write{path:<|"|>a.txt<|"|>,content:<|"|>hi<|"|>}'
NAMED = '{"path": "a.txt", "content": "hi"}'
TWICE: list[tuple[CallSyntax, str]] = [
    (HERMES, f"<tool_call>\n{JSON}\n<tool_call>\n{JSON}\n</tool_call>"),
    (HERMES, f"<tool_call>\n{JSON}\n<tool_call>\n{JSON}\n"),
    (HERMES, f"<tool_call>\n{JSON}\n{JSON}\n</tool_call>"),
    (HERMES, f"<tool_call>{JSON}, {JSON}\n<tool_call>"),
    (HERMES, f"<tool_call>\n[{JSON}, {JSON}]\n</tool_call>"),
    (HERMES, f"{JSON}\n</tool_call>\n{JSON}\n</tool_call>"),
    (HERMES, f"<tool_call>\n{JSON}\n</tool_call>\n{JSON}\n</tool_call>"),
    (XmlCalls(), f"<tool_call>\n{XML}\n<tool_call>\n{XML}\n</tool_call>"),
    (XmlCalls(), f"<tool_call>\n{XML}\n<tool_call>\n{XML}"),
    (XmlCalls(), f"<tool_call>\n{XML}\n{XML}\n</tool_call>"),
    (XmlCalls(), f"<tool_call>\n{HEAD}{REST}</function>\n<tool_call>\n{HEAD}{REST}</function>\n"),
    (XmlCalls(), f"{XML}\n{XML}\n"),
    (GemmaCalls(), f"<|tool_call>{GEMMA}<|tool_call>{GEMMA}<tool_call|>"),
    (GemmaCalls(), f"<|tool_call>{GEMMA}<|tool_call>{GEMMA}"),
    (JsonListCalls("<TOOLCALL>", "</TOOLCALL>"), f"<TOOLCALL>[{JSON}, {JSON}]"),
    (JsonListCalls("<TOOLCALL>", "</TOOLCALL>"), f"<TOOLCALL>{JSON}<TOOLCALL>{JSON}</TOOLCALL>"),
    (MistralCalls(), f"[TOOL_CALLS]{JSON}[TOOL_CALLS] [{JSON}] "),
    (
        MistralCalls(named=True),
        f"[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{NAMED}[TOOL_CALLS]write[ARGS]{NAMED}",
    ),
]


@pytest.mark.parametrize(("syntax", "text"), TWICE, ids=str)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("before", ["", "So:\n"])
def test_two_calls_are_read_with_marks_missing_between_them(syntax, text, size, before):
    text = before + text
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    _, content, calls = read(syntax, pieces, functions=WRITE)
    assert [(name, json.loads(text)) for name, text in calls] == [("write", WRITTEN_CALL)] * 2
    assert content == before.strip()


@pytest.mark.parametrize("between", ["; ", ";", ", ", "\n", ""])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_of_objects_alone_are_read_with_what_models_write_between_them(between, size):
    """A value may hold what stands between calls, and behind them nothing else may stand."""
    one = '{"name": "write", "parameters": {"path": "a.txt", "content": "}; {"}}'
    text = between.join([one, one, one])
    for whole, expected in ((text, 3), (text + between + "Done.", 0), (one + between + "{}", 0)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        _, content, calls = read(BareJsonCall(), pieces, functions=WRITE)
        assert len(calls) == expected
        assert all(json.loads(text)["content"] == "}; {" for _, text in calls)
        assert content == ("" if expected else whole)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "free"}', {}),
        ('{"name": "free", "arguments": null}', {}),
        ('{"name": "free", "parameters": {"a": 1}}', {"a": 1}),
        ('{"parameters": {"a": 1}, "name": "free"}', {"a": 1}),
        ('{"name": "free", "arguments": 3}', None),
        ('{"name": "other"}', None),
        ('{"arguments": {}}', None),
    ],
)
def test_arguments_that_are_missing_or_named_otherwise(body, arguments):
    text = f"<tool_call>\n{body}\n</tool_call>"
    _, content, calls = read(HERMES, list(text), functions=WRITE)
    if arguments is None:
        assert (content, calls) == (text, [])
    else:
        assert [(name, json.loads(text)) for name, text in calls] == [("free", arguments)]


OBJECTS = [
    *('{"name": "Bob", "age": 3} is a person', '{"name": "write", "arguments": {}} would call'),
    *('{"name": "write", "arguments": {"path": "a"}}', '{"name": ["write"]} is odd', '{"name"'),
]


@pytest.mark.parametrize("text", OBJECTS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_object_that_nothing_closes_as_a_call_is_text(text, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(HERMES, pieces, functions=WRITE) == ("", text, [])


def test_an_object_that_is_no_call_holds_up_no_thought():
    """What comes behind it is sent before the thought ends."""
    form = ReplyForm(Dialect(HERMES, REASONING[0], {}), WRITE, thinking=True)
    for text in OBJECTS[:2]:
        parser = ReplyParser(form)
        parts = parser.feed(text + " and")
        assert parts == [ReasoningText(text + " and")]


def literal_call(syntax: CallSyntax, value: dict[str, str]) -> str:
    """A call of ``write`` as a model of the syntax writes it."""
    arguments = json.dumps(value)
    match syntax:
        case XmlCalls():
            inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in value.items())
            return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"
        case GlmCalls():
            inner = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in value.items()
            )
            return f"<tool_call>write\n{inner}</tool_call>"
        case InvokeCalls():
            inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in value.items())
            called = f'<invoke name="write">\n{inner}</invoke>'
            return f"<minimax:tool_call>\n{called}\n</minimax:tool_call>"
        case SectionCalls():
            head = "".join((syntax.begin, syntax.opens, *syntax.before, "write"))
            number, end = ":0" * syntax.numbered, syntax.closes + syntax.end
            return f"{head}{number}{syntax.after}{arguments}{syntax.behind}{end}"
        case GemmaCalls():
            inner = ",".join(f'{k}:<|"|>{v}<|"|>' for k, v in value.items())
            return f"<|tool_call>call:write{{{inner}}}<tool_call|>"
        case PythonCalls():
            inner = ", ".join(f"{k}={json.dumps(v)}" for k, v in value.items())
            return f"{syntax.begin}{syntax.opens}write({inner}){syntax.closes}{syntax.end}"
        case BareJsonCall():
            return f'{{"name": "write", "parameters": {arguments}}}'
        case MistralCalls(named=True):
            return f"[TOOL_CALLS]write[ARGS]{arguments}"
        case MistralCalls():
            return f'[TOOL_CALLS][{{"name": "write", "arguments": {arguments}}}]'
        case KeyedJsonCalls():
            return f'<|tools_prefix|>[{{"write": {arguments}}}]<|tools_suffix|>'
        case JsonListCalls():
            return f'<TOOLCALL>[{{"name": "write", "arguments": {arguments}}}]</TOOLCALL>'
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


HOLDING = [*SYNTAXES[:-1], MistralCalls(named=True)]


@pytest.mark.parametrize("syntax", HOLDING, ids=lambda s: f"{type(s).__name__}")
@pytest.mark.parametrize("pieces", [False, True])
def test_a_value_may_hold_a_whole_call(syntax, pieces):
    """Of its own syntax or of another: it is part of the value, and the call is whole."""
    for other in HOLDING:
        inner = literal_call(other, {"path": "b", "content": "c"})
        if isinstance(syntax, GemmaCalls) and '<|"|>' in inner:
            continue
        for value in (inner, f"see\n{inner}\nand {inner}", f"{inner}\n"):
            text = literal_call(syntax, {"path": "a.txt", "content": value})
            _, content, calls = read(syntax, list(text) if pieces else [text], functions=WRITE)
            (call,) = calls
            assert call[0] == "write"
            told = json.loads(call[1])
            assert told["path"] == "a.txt"
            assert told["content"] == value
            assert content == ""


def test_a_value_that_only_mentions_a_call_ends_where_it_ends():
    """The opening tag of another call alone; and the next call is read too."""
    value = "write <function=write> first, or <tool_call>"
    one = literal_call(XmlCalls(), {"path": "a", "content": value})
    two = literal_call(XmlCalls(), WRITTEN_CALL)
    for text in (one, f"{one}\n{two}"):
        _, content, calls = read(XmlCalls(), list(text), functions=WRITE)
        assert content == ""
        assert json.loads(calls[0][1]) == {"path": "a", "content": value}
        assert [json.loads(call[1]) for call in calls[1:]] == [WRITTEN_CALL] * (text != one)


@pytest.mark.parametrize(
    "text",
    [
        "The tag <function=write> opens a call.",
        "<function=unknown>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        *("<function=\nwrite>", "<function=", "a </tool_call> b", "<function=write"),
    ],
)
def test_a_tag_that_opens_no_call_is_text(text):
    assert read(XmlCalls(), list(text), functions=WRITE) == ("", text, [])
    assert read(XmlCalls(), [text], functions=WRITE) == ("", text, [])


@pytest.mark.parametrize("syntax", HOLDING, ids=lambda s: f"{type(s).__name__}")
@pytest.mark.parametrize("pieces", [False, True])
def test_a_call_ends_a_thought_that_nothing_else_ends(syntax, pieces):
    call = literal_call(syntax, WRITTEN_CALL)
    many = 2 if syntax.begins_each_call else 1
    text = f"<think>let me see {call}" + f"\n{call}" * (many - 1)
    reasoning = REASONING[0]
    options: dict[str, Any] = {"reasoning": reasoning, "functions": WRITE}
    told = read(syntax, list(text) if pieces else [text], **options)
    assert told[:2] == ("let me see", "")
    assert [json.loads(arguments) for _, arguments in told[2]] == [WRITTEN_CALL] * many
    # One that is closed after all was a thought, calls and all; so is one that calls nothing.
    closed = f"{text}\n no</think>yes"
    reasoning, content, calls = read(syntax, list(closed) if pieces else [closed], **options)
    assert (reasoning, content, calls) == (f"{text}\n no".removeprefix("<think>"), "yes", [])
    for malformed in (f"{syntax.begin} is a mark", f"{syntax.begin}", "x <functio"):
        said = read(syntax, list(f"<think>{malformed}"), **options)
        assert said == (malformed, "", [])


def test_text_after_a_call_that_ended_a_thought_is_text():
    call = literal_call(HERMES, WRITTEN_CALL)
    options: dict[str, Any] = {"reasoning": REASONING[0], "functions": WRITE, "thinking": True}
    told = read(HERMES, [f"hm {call} done"], **options)
    assert told[:2] == ("hm", "done")
    assert len(told[2]) == 1


@pytest.mark.parametrize("syntax", HOLDING, ids=lambda s: f"{type(s).__name__}")
def test_a_forced_call_that_the_limit_cut_is_no_text(syntax):
    """Wherever it is cut; a whole one before it counts. The control: unforced, it is text."""
    call = literal_call(syntax, WRITTEN_CALL)
    for end in range(1, len(call)):
        forced = {"functions": WRITE, "forced": True, "enforced": True, "exact": True}
        assert read(syntax, list(call[:end]), **forced)[1] == ""
    assert read(syntax, [call[:3]], functions=WRITE)[1] == call[:3]


FENCED = JsonObjectCalls("<tool_call>", "</tool_call>", fenced=True)
FENCED_CALL = '```json\n{"name": "write", "arguments": {"path": "a.txt", "content": "hi"}}\n```'


@pytest.mark.parametrize("enforced", [False, True])
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (FENCED_CALL, "", 1),
        (f"So:\n\n{FENCED_CALL}\nDone.", "So:Done.", 1),
        (f"{FENCED_CALL}\n{FENCED_CALL}", "", 2),
        (FENCED_CALL.replace("\n```", "\n" + FENCED_CALL[8:]), "", 2),
        (FENCED_CALL.replace("hi", "hi").replace(": ", " :\n  "), "", 1),
        (f"<tool_call>\n{FENCED_CALL[8:-4]}\n</tool_call>\n{FENCED_CALL}", "", 2),
    ],
)
def test_fenced_calls_are_read(text, content, count, size, enforced):
    """Beside a grammar for other calls, too, where a fence is text to the grammar."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    _, said, calls = read(FENCED, pieces, functions=WRITE, enforced=enforced, exact=enforced)
    assert [(name, json.loads(text)) for name, text in calls] == [("write", WRITTEN_CALL)] * count
    assert said == content


@pytest.mark.parametrize("enforced", [False, True])
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"a": 1}\n``` and more', '```json\n{"name": "other", "arguments": {}}\n```',
        '```json\n{"name": "free"}\n```',
        '```json\n{"name": "free", "description": "x", "arguments": {}}\n```',
        '```json\n{"name": "free", "parameters": {"type": "object"}}\n```',
        '```json\n{"name": "free", "arguments": {}}',
        '```json\n{"name": "free", "arguments": {"a": "```"}\n``` }',
        '```json\n{"name": "free", "arguments": {}} and\n```',
        '```python\n{"name": "free", "arguments": {}}\n```', "```json\n```", "```js",
    ],
)  # fmt: skip
def test_other_fenced_texts_stay_texts(text, size, enforced):
    """Descriptions of functions, other functions, unfinished and other objects."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    _, said, calls = read(FENCED, pieces, functions=WRITE, enforced=enforced, exact=enforced)
    assert (said, calls) == (text, [])


def test_fences_stay_text_where_the_model_has_marks_of_its_own():
    _, said, calls = read(HERMES, list(FENCED_CALL), functions=WRITE, exact=True)
    assert (said, calls) == (FENCED_CALL, [])


def test_marks_in_a_string_are_looked_at_once(monkeypatch):
    """Mistral's calls, which end with the answer, are divided at marks outside of strings."""
    seen = 0
    is_inside = StringScanner.is_inside

    def counted(scanner: StringScanner, text: str, end: int) -> bool:
        nonlocal seen
        seen += end - scanner.count
        return is_inside(scanner, text, end)

    monkeypatch.setattr(StringScanner, "is_inside", counted)
    content = "[TOOL_CALLS]" * 100
    arguments = json.dumps({"path": "a.txt", "content": content})
    body = f"write[ARGS]{arguments}[TOOL_CALLS]write[ARGS]{arguments}"
    calls = MistralCalls(named=True).parse(body, WRITE)
    assert calls is not None
    assert [json.loads(call.arguments)["content"] for call in calls] == [content, content]
    assert seen <= 2 * len(body)
