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
from harness.host.dialect.python_calls import LlamaCalls, PythonAnswer, PythonCalls
from harness.host.dialect.section_calls import SectionCalls
from harness.host.dialect.tagged_calls import GlmCalls, InvokeCalls
from harness.host.dialect.xml_calls import XmlCalls
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.reply_parts import CallArguments, ReasoningText
from tests.serve import test_dialects
from tests.serve.test_reply import FUNCTIONS, HERMES, LISTED, SYNTAXES, read
from tests.tables import table

WRITE = {
    "write": Function(
        "write", {"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
    ),
    "free": Function("free"),
}
WRITTEN_CALL = {"path": "a.txt", "content": "hi"}


TABLE = table(__file__, "replies")
NAMED = {
    **test_dialects.SYNTAXES,
    "fenced hermes": JsonObjectCalls("<tool_call>", "</tool_call>", fenced=True),
}
GIVEN = {"weather": FUNCTIONS, "write": WRITE}
LONG = [
    *(
        ("lfm2", "weather", False, f"<|tool_call_start|>[get_weather({body})]<|tool_call_end|>")
        for body in (f"days={'1' * 5000}", f"places={'[' * 2000}{']' * 2000}")
    ),
    ("gemma", "weather", False, f"<|tool_call>call:get_weather{{days:{'1' * 5000}}}<tool_call|>"),
]


def pieces_of(text):
    """The text whole, in pieces of some sizes, and cut in two at each of its first places."""
    yield [text]
    for size in (1, 5, 7) if len(text) < 1000 else (64,):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    for cut in range(min(len(text), 80)):
        yield [text[:cut], text[cut:]]


def answers_of(syntax, functions, enforced, text):
    """What is read of a text in any pieces, beside a grammar for other calls where it is so."""
    for pieces in pieces_of(text):
        options = {"enforced": enforced, "exact": enforced, "functions": GIVEN[functions]}
        yield read(NAMED[syntax], pieces, **options)


@pytest.mark.parametrize(("syntax", "functions", "enforced", "text"), [*TABLE["texts"], *LONG])
def test_what_is_no_call_is_text(syntax, functions, enforced, text):
    """Malformed and unfinished calls, those of other functions, marks and fences alone."""
    for answer in answers_of(syntax, functions, enforced, text):
        assert answer == ("", text, [])


@pytest.mark.parametrize(
    ("syntax", "functions", "enforced", "text", "content", "calls"), TABLE["calls"]
)
def test_calls_are_read(syntax, functions, enforced, text, content, calls):
    """Also with marks missing, with several calls between two marks, in fences, and in Python."""
    for reasoning, said, found in answers_of(syntax, functions, enforced, text):
        assert (reasoning, said) == ("", content)
        assert [[name, json.loads(arguments)] for name, arguments in found] == calls


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


OBJECTS = ('{"name": "Bob", "age": 3} is a person', '{"name": "write", "arguments": {}} would call')


def test_an_object_that_is_no_call_holds_up_no_thought():
    """What comes behind it is sent before the thought ends."""
    form = ReplyForm(Dialect(HERMES, REASONING[0], {}), WRITE, thinking=True)
    for text in OBJECTS:
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
