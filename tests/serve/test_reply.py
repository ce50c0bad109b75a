"""Answers taken apart: the calls that real templates write, in any pieces, and nothing is lost."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.host.dialect import REASONING, Dialect, Reasoning
from harness.host.dialect.calls import CallSyntax, Function
from harness.host.dialect.gemma_calls import GemmaCalls
from harness.host.dialect.json_calls import (
    JsonListCalls,
    JsonObjectCalls,
    KeyedJsonCalls,
    MistralCalls,
)
from harness.host.dialect.python_calls import OLMO_CALLS, LlamaCalls, PythonAnswer, PythonCalls
from harness.host.dialect.section_calls import DEEPSEEK_CALLS, FENCED_CALLS, KIMI_CALLS
from harness.host.dialect.tagged_calls import ON_ONE_LINE, GlmCalls, InvokeCalls
from harness.host.dialect.xml_calls import XmlCalls
from harness.host.reply import BLANKS, ReplyForm, ReplyParser
from harness.host.reply_parts import CallArguments, CallBegin, Content, Part, ReasoningText, joined
from reference.model.chat_template import ChatTemplate
from tests.needs import need_file
from tests.paths import CHAT_TEMPLATES
from tests.serve.chat_templates import (
    APERTUS,
    DEEPSEEK,
    FENCED,
    GLM,
    KIMI,
    LFM2,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    NEW_MISTRAL,
)

HERMES = JsonObjectCalls("<tool_call>", "</tool_call>", before="\n", after="\n")
LISTED = JsonListCalls("<TOOLCALL>", "</TOOLCALL>")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
}
FUNCTIONS = {name: Function(name, PARAMETERS) for name in ("get_weather", "get-time_2")}
CALLS = [
    {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}},
    {"name": "get-time_2", "arguments": {}},
]
WRITTEN: dict[str, tuple[CallSyntax, Callable[[], str], str, str, int]] = {
    "qwen3": (HERMES, lambda: shared("Qwen-Qwen3-0.6B"), "</think>\n\n", "<|im_end|>", 2),
    "qwen3.5": (XmlCalls(), lambda: shared("Qwen3.5-4B"), "</think>\n\n", "<|im_end|>", 2),
    "gemma4": (GemmaCalls(), lambda: shared("google-gemma-4-31B-it"), "model\n", "<|tool_resp", 2),
    "llama3": (LlamaCalls(), lambda: LLAMA, "assistant<|end_header_id|>\n\n", "<|eot_id|>", 1),
    "glm": (GlmCalls(form=ON_ONE_LINE), lambda: GLM, "<|assistant|>\n", "", 2),
    "deepseek": (DEEPSEEK_CALLS, lambda: DEEPSEEK, "<|assistant|>", "", 2),
    "fenced deepseek": (FENCED_CALLS, lambda: FENCED, "<|assistant|>", "", 2),
    "apertus": (KeyedJsonCalls(), lambda: APERTUS, "assistant_start|>", "<|assistant_end|>", 2),
    "kimi": (KIMI_CALLS, lambda: KIMI, "<|assistant|>", "", 2),
    "lfm2": (PythonCalls(), lambda: LFM2, "assistant\n", "<|im_end|>", 2),
    "mistral": (MistralCalls(), lambda: MISTRAL, "[/INST]", "", 2),
    "nemotron": (LISTED, lambda: NEMOTRON, "[/INST]", "", 2),
    "new mistral": (MistralCalls(named=True), lambda: NEW_MISTRAL, "[/INST]", "", 2),
}
"""Syntax, template, what stands before an assistant's turn, what ends it, most calls of a turn."""


def shared(name: str) -> str:
    return need_file(CHAT_TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(scope="module", params=WRITTEN)
def written(request) -> Any:
    """(syntax, what a model would have written for calls, most calls) of a family."""
    syntax, source, before, after, most = WRITTEN[request.param]
    with ChatTemplate(source(), source="m.gguf") as template:

        def text_of(calls: Sequence[dict[str, Any]]) -> str:
            turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call} for call in calls],
            }
            messages = [{"role": "user", "content": "go"}, turn]
            text = template.render(messages, add_generation_prompt=False).text
            text = text[text.rindex(before) + len(before) :]
            return text[: text.rindex(after)] if after else text

        yield syntax, text_of, most


def told(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content and calls, after checking the order in which calls are told."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return reasoning, content, calls


def read(
    syntax: CallSyntax | None, pieces: Sequence[str], **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    dialect = Dialect(syntax, options.pop("reasoning", None))
    form = ReplyForm(dialect, options.pop("functions", FUNCTIONS), **options)
    parser = ReplyParser(form, b"id")
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return told([*parts, *parser.finish()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    """``text`` cut at places, which count modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places})
    starts = [0, *ends]
    return [text[a:b] for a, b in zip(starts, [*ends, len(text)], strict=True)]


places = st.lists(st.integers(0, 10**6), max_size=30)
quiet = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<[{"), max_size=12
)
values = st.fixed_dictionaries(
    {},
    optional={
        "city": quiet,
        "days": st.integers(-5, 10**9),
        "exact": st.booleans(),
        "note": st.none() | quiet.filter(lambda text: not text.strip().isdigit()),
        "places": st.lists(quiet, max_size=3),
        "where": st.fixed_dictionaries({}, optional={"x": st.integers(0, 9)}),
    },
)


def test_what_a_template_writes_is_read_back(written):
    """Calls as the model's own template shows them to it."""
    syntax, text_of, most = written
    reasoning, content, calls = read(syntax, [text_of(CALLS[:most])])
    assert (reasoning, content) == ("", "")
    assert [(name, json.loads(text)) for name, text in calls] == [
        (call["name"], call["arguments"]) for call in CALLS[:most]
    ]


@given(data=st.data())
def test_any_arguments_in_any_pieces(written, data):
    """Whatever the arguments and however the text is cut: the same calls, and the same text."""
    syntax, text_of, most = written
    names = st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=most)
    requested = [{"name": name, "arguments": data.draw(values)} for name in data.draw(names)]
    text = text_of(requested)
    if not syntax.only_first:
        text = data.draw(st.sampled_from(["", "Let me look.\n\n", "a < b "])) + text
    whole = read(syntax, [text])
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == [
        (call["name"], call["arguments"]) for call in requested
    ]
    assert read(syntax, cut(text, data.draw(places))) == whole
    assert read(syntax, list(text)) == whole


MARKED = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", '{"name": "get_weather", "arguments": {', "}}", "}"),
            *('"city": "', '"', "\\", "\n", " ", "x", "<", "</tool", "<think>", "</think>", "é"),
            *("<function=get_weather>", "</function>", "<parameter=city>", "</parameter>"),
            *("<|tool_call>", "call:get_weather{", "<tool_call|>", '<|"|>', "[TOOL_CALLS]"),
            *("[ARGS]", "</invoke>", "</minimax:tool_call>"),
            *("get_weather", '{"name": "get_weather", "parameters": {}}', "[", "]", "{}"),
            *("<arg_key>city", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>get_"),
            *("<function_calls>", "</function_calls>", "[get_weather("),
            *("<|tool_call_start|>", "get_weather(", "city='", "'", ")", ", ", "<|tool_call_end|>"),
            *("<minimax:tool_call>", '<invoke name="get_weather">', '<parameter name="city">'),
            *(KIMI_CALLS.begin, KIMI_CALLS.opens, "functions.get_weather:0", KIMI_CALLS.after),
            *(KIMI_CALLS.closes, KIMI_CALLS.end, DEEPSEEK_CALLS.begin, DEEPSEEK_CALLS.opens),
            *(DEEPSEEK_CALLS.after, "function", "\n```json\n", "\n```", DEEPSEEK_CALLS.closes),
            *(
                DEEPSEEK_CALLS.end,
                "<TOOLCALL>",
                *("</TOOLCALL>", '[{"name": "get_weather", "arguments": {}}]'),
                *("<|tools_prefix|>", '[{"get_weather": {}}]', "<|tools_suffix|>"),
            ),
        ]
    ),
    max_size=14,
).map("".join)
SYNTAXES: list[CallSyntax | None] = [HERMES, XmlCalls(), GemmaCalls(), LlamaCalls(), LISTED]
SYNTAXES += [MistralCalls(), PythonCalls(), GlmCalls(), InvokeCalls(), DEEPSEEK_CALLS]
SYNTAXES += [FENCED_CALLS, KIMI_CALLS, KeyedJsonCalls(), PythonAnswer(), OLMO_CALLS, None]


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: type(s).__name__)
@given(text=MARKED, where=places, enforced=st.booleans(), many=st.booleans(), data=st.data())
def test_pieces_never_matter(syntax, text, where, enforced, many, data):
    """Also for what no model should write."""
    options = {
        "reasoning": data.draw(st.sampled_from([None, *REASONING])),
        "enforced": enforced,
        "many": many,
    }
    options["thinking"] = options["reasoning"] is not None and data.draw(st.booleans())
    assert read(syntax, cut(text, where), **options) == read(syntax, [text], **options)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: type(s).__name__)
@given(text=MARKED)
@example(text="<TOOLCALL>[]</TOOLCALL>")
@example(text="[TOOL_CALLS][]")
def test_no_text_is_lost(syntax, text):
    """What is told without a call is the text itself, but for nothing at all."""
    _, content, calls = read(syntax, [text])
    if not calls:
        assert content == text


@given(text=MARKED, where=places)
def test_thoughts_and_text_are_all_there_is(text, where):
    """Nothing but the marks and the blanks beside them is left out."""
    reasoning, content, _ = read(None, cut(text, where), reasoning=REASONING[0], functions={})

    begun = text.lstrip(BLANKS)
    if begun.startswith("<think>"):
        before, mark, after = begun.removeprefix("<think>").partition("</think>")
        before = before.lstrip(BLANKS)
        expected = (before.rstrip(BLANKS) if mark else before, after.lstrip(BLANKS))
    else:
        expected = ("", text)
    assert (reasoning, content) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", ("hm", "yes", [])),
        ("<think>\nhm", ("hm", "", [])),
        ("yes <think>no</think>", ("", "yes <think>no</think>", [])),
        ("\n yes\n", ("", "\n yes\n", [])),
        ("<think></think>a</think>", ("", "a</think>", [])),
    ],
)
def test_thoughts_come_first_or_not_at_all(text, expected):
    assert read(None, [text], reasoning=REASONING[0], functions={}) == expected


def test_a_prompt_may_begin_the_thoughts():
    form = {"reasoning": REASONING[0], "functions": {}, "thinking": True}
    assert read(None, ["\nhm\n</think>", "\n\nyes "], **form) == ("hm", "yes ", [])
    assert read(None, ["\nhm"], **form) == ("hm", "", [])


def test_gemma_thinks_in_a_channel():
    text = "<|channel>thought\nhm\n<channel|>yes"
    assert read(GemmaCalls(), list(text), reasoning=REASONING[1]) == ("hm", "yes", [])


def test_enforced_arguments_come_as_they_are_written():
    """The name first, then each piece; others wait until the call is known to be one."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    form = ReplyForm(Dialect(HERMES), FUNCTIONS, enforced=True)
    parser = ReplyParser(form)
    parts = [parser.feed(character) for character in text]
    first = next(n for n, found in enumerate(parts) if found)
    assert isinstance(parts[first][0], CallBegin)
    pieces = [part for found in parts[first:] for part in found[-1:]]
    assert [part.text for part in pieces if isinstance(part, CallArguments)] == list(
        '{"city": "Oslo"}'
    )
    patient = ReplyParser(ReplyForm(Dialect(HERMES), FUNCTIONS))
    assert [n for n, character in enumerate(text) if patient.feed(character)] == [len(text) - 1]


def test_the_one_call_that_may_be_made_completes_the_answer():
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    parser = ReplyParser(ReplyForm(Dialect(HERMES), FUNCTIONS, many=False))
    assert not parser.complete
    parts = parser.feed(call + "\n" + call + " and more")
    assert parser.complete
    assert told([*parts, *parser.finish()])[2] == [("get_weather", "{}")]


def test_ids_of_calls_are_the_same_again_and_differ():
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'

    def ids(identity: bytes, syntax: CallSyntax = HERMES) -> list[str]:
        parser = ReplyParser(ReplyForm(Dialect(syntax), FUNCTIONS), identity)
        return [part.id for part in parser.feed(call + call) if isinstance(part, CallBegin)]

    first, second = ids(b"a")
    assert ids(b"a") == [first, second]
    assert len({first, second, *ids(b"b")}) == 4
    mistral = ReplyParser(ReplyForm(Dialect(MistralCalls()), FUNCTIONS), b"a")
    begin, _ = [*mistral.feed("[TOOL_CALLS]get_weather[ARGS]{}"), *mistral.finish()]
    assert isinstance(begin, CallBegin)
    # Mistral's templates take no others.
    assert len(begin.id) == 9
    assert begin.id.isalnum()


def test_neighbours_are_joined():
    others = [ReasoningText("c"), CallArguments(0, "d"), CallArguments(1, "e")]
    assert joined([Content("a"), Content("b"), *others]) == [Content("ab"), *others]


def test_a_prompt_shows_whether_the_model_thinks():
    think = Reasoning("<think>", "</think>")
    assert think.opened_by("<|im_start|>assistant\n<think>\n")
    assert not think.opened_by("<|im_start|>assistant\n")
    assert think.closed_by("<think>\n\n</think>\n\n")
