"""Answers of gpt-oss taken apart: its messages, in any pieces, and what is none of its format."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import RequestError
from harness.host.dialect.harmony import HARMONY_MARKS, HarmonyDialect
from harness.host.harmony_reply import FramedAnswer, reply_parser
from harness.host.reply import ReplyForm
from harness.host.reply_parts import Content, ReasoningText
from harness.host.thinking import thinking_arguments
from reference.model.chat_template import ChatTemplate
from tests.serve.chat_templates import HARMONY as TEMPLATE
from tests.serve.test_reply import CALLS, FUNCTIONS, told
from tests.tables import table

Told = tuple[str, str, list[tuple[str, str]]]
THOUGHT = "<|channel|>analysis<|message|>Hm. 2 < 3?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ASSISTANT = "<|start|>assistant"
TO_WEATHER = "commentary to=functions.get_weather"
OSLO = '{"city": "Oslo", "days": 3}'
WHOLE: dict[str, tuple[str, Told]] = {
    name: (text, (thoughts, said, [(called, arguments) for called, arguments in calls]))
    for name, (text, (thoughts, said, calls)) in table(__file__, "harmony_replies")["whole"].items()
}
"""What a model may write, and its thoughts, text and calls."""


def read(pieces: Sequence[str], **options: Any) -> Told:
    form = ReplyForm(HarmonyDialect(), options.pop("functions", FUNCTIONS), **options)
    parser = reply_parser(form, b"id")
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return told([*parts, *parser.finish()])


@pytest.mark.parametrize("name", WHOLE)
def test_every_cut_gives_the_same_parts(name):
    """Two pieces, cut at every place, and one piece a character."""
    text, expected = WHOLE[name]
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]]) == expected
    assert read(list(text)) == expected


SNIPPETS = [
    *HARMONY_MARKS, "analysis", "final", "commentary", "assistant", " to=functions.get_weather",
    "to=", "json", OSLO, '{"a": "', "\n", " ", "Hi", "<", "<|", "|>",
]  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(SNIPPETS), max_size=12), st.booleans(), st.booleans())
def test_whatever_is_written_is_read_alike_in_any_pieces(snippets, enforced, thinking):
    text = "".join(snippets)
    whole = read([text], enforced=enforced, thinking=thinking)
    assert read(snippets, enforced=enforced, thinking=thinking) == whole
    assert read(list(text), enforced=enforced, thinking=thinking) == whole


def test_the_beginning_of_a_mark_is_no_argument():
    """A limit of a grammar's answer may cut it there, character by character."""
    text = f"<|channel|>{TO_WEATHER}<|message|><|call|>"
    assert read([text], enforced=True) == read(list(text), enforced=True)
    assert read(list(text), enforced=True) == ("", "", [("get_weather", "")])


def test_arguments_come_as_they_are_written_where_a_grammar_writes_them():
    form = ReplyForm(HarmonyDialect(), FUNCTIONS, enforced=True)
    parser = reply_parser(form)
    parts = [
        *parser.feed(f"<|channel|>{TO_WEATHER} <|constrain|>json<|message|>"),
        *parser.feed(OSLO[:7]),
    ]
    assert told(parts) == ("", "", [("get_weather", OSLO[:7])])
    parts += [*parser.feed(OSLO[7:]), *parser.finish()]
    assert told(parts) == ("", "", [("get_weather", OSLO)])
    assert parser.calls == 1


def test_one_call_is_enough_where_one_may_be_made():
    call = f"<|channel|>{TO_WEATHER}<|message|>{OSLO}<|call|>"
    assert read([call + call], many=False) == ("", "", [("get_weather", OSLO)])
    assert len(read([call + call])[2]) == 2


def test_thoughts_are_counted_while_they_come():
    parser = reply_parser(ReplyForm(HarmonyDialect()))
    parser.feed("<|channel|>analysis<|message|>Hm")
    assert parser.thinking
    parser.feed(f"<|end|><|start|>assistant{FINAL}Y")
    assert not parser.thinking


def test_a_prompt_may_have_begun_the_thoughts():
    assert read([f"on.<|end|><|start|>assistant{FINAL}So."], thinking=True) == ("on.", "So.", [])


def test_a_terminal_shows_thoughts_and_then_the_text():
    answer = FramedAnswer.of(HarmonyDialect())
    parts = [*answer.parser.feed(f"{THOUGHT}{FINAL}Hel"), *answer.parser.feed("lo.")]
    assert answer.take(parts) + answer.take(answer.parser.finish()) == "Hm. 2 < 3?\n\nHello."
    assert answer.content == "Hello."


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["name"])
def test_what_the_template_writes_is_read_back(call):
    """A call in an earlier turn looks as the model writes it."""
    turn = {
        "role": "assistant", "content": None, "reasoning_content": "Hm.",
        "tool_calls": [{"type": "function", "function": call}],
    }  # fmt: skip
    with ChatTemplate(TEMPLATE, source="m.gguf") as template:
        messages = [{"role": "user", "content": "go"}, turn]
        text, before = template.render(messages, add_generation_prompt=False).text, ASSISTANT
        reasoning, content, calls = read([text[text.index(before) + len(before) :]])
        assert template.has_reasoning_effort
        assert template.frames_messages
        assert template.render(messages[:1]).opening == before
    assert (reasoning, content) == ("Hm.", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call["name"], call["arguments"])
    ]


def test_a_template_gets_thoughts_under_its_own_name():
    """None beside the text of a message with calls, which OpenAI's template refuses."""
    call = {"type": "function", "function": CALLS[0]}
    with ChatTemplate(TEMPLATE, source="m.gguf") as template:

        def rendered(**turn: Any) -> str:
            messages = [{"role": "user", "content": "go"}, {"role": "assistant", **turn}]
            return template.render(messages).text

        assert ">analysis<|message|>Hm.<|end|>" in rendered(
            content=None, reasoning_content="Hm.", tool_calls=[call]
        )
        both = rendered(content="Look:", reasoning_content="Hm.", tool_calls=[call])
        assert ">analysis<|message|>Look:<|end|>" in both
        assert "Hm." not in both
        assert "Hm." not in rendered(content="Yes.", reasoning_content="Hm.")


@pytest.mark.parametrize(
    ("switch", "level", "told"),
    [(None, None, "medium"), (True, None, "medium"), (False, None, "low"), (None, "high", "high")],
)
def test_a_model_that_always_thinks_is_told_how_much(switch, level, told):
    """Switched off, it thinks least: its template has no other way."""
    messages = [{"role": "user", "content": "hi"}]
    with ChatTemplate(TEMPLATE, source="m.gguf") as template:
        arguments = thinking_arguments(template, "tiny", switch, level)
        assert f"Reasoning: {told}<|end|>" in template.render(messages, **arguments).text


def test_a_model_without_levels_refuses_one():
    with ChatTemplate("{{ messages[0].content }}", source="m.gguf") as template:
        with pytest.raises(RequestError, match=r"thinking: tiny has no level high; give on or off"):
            thinking_arguments(template, "tiny", None, "high")
        with pytest.raises(RequestError, match=r"thinking: tiny has no switch for it"):
            thinking_arguments(template, "tiny", True)
        assert thinking_arguments(template, "tiny", False) == {"enable_thinking": False}


def test_reasoning_may_be_left_out_of_a_terminal():
    parser = reply_parser(ReplyForm(HarmonyDialect()))
    answer = FramedAnswer(parser, frozenset(), shows_reasoning=False)
    assert answer.take([ReasoningText("because"), Content("ye"), Content("s")]) == "yes"
    assert answer.content == "yes"


def test_marks_in_a_string_are_looked_at_once():
    """Each time from the beginning of the call, this took minutes."""
    city = "<|end|>" * 20_000
    began = time.process_time()
    text = f'{ASSISTANT}<|channel|>{TO_WEATHER}<|message|>{{"city": "{city}"}}<|call|>'
    _, said, calls = read([text[:1000], text[1000:]])
    assert (said, [(name, json.loads(given)) for name, given in calls]) == (
        "",
        [("get_weather", {"city": city})],
    )
    assert time.process_time() - began < 20
