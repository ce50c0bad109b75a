"""Conversations with tools by templates of families: all of it reaches the model, the calls that it
writes are read, forced calls have the template's own form, and what is not known is said."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from harness.host.dialect import Dialect
from harness.host.dialect.calls import CallSyntax
from harness.host.dialect.json_calls import JsonListCalls, JsonObjectCalls
from harness.host.dialect.python_calls import OLMO_CALLS, LlamaCalls, PythonAnswer
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.template_dialect import tried_dialect
from harness.serve.chat import ChatPlan, plan_chat
from harness.serve.wire import ChatRequest, converted
from reference.model.chat_template import ChatTemplate
from tests.serve import chat_templates as templates
from tests.serve.calling import MESSAGES, TOOLS, check_call
from tests.serve.test_reply import told
from tests.serve.test_structured import allowed, walk
from tests.tables import table

HERMES = JsonObjectCalls("<tool_call>", "</tool_call>", before="\n", after="\n")
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n"


class Family(NamedTuple):
    """A template, the syntax of its calls, the text behind a call, and the ends of its prompts with
    reasoning on and off; None if it has no such switch. ``own_form``: whether it writes calls as
    the grammar does."""

    template: str
    calls: CallSyntax
    behind: str
    on: str | None = None
    off: str | None = None
    own_form: bool = True


FAMILIES = {
    "qwen3vl": Family(templates.QWEN_VL, HERMES, "<|im_end|>"),
    "ernie4_5-moe": Family(templates.ERNIE, HERMES, "<|im_end|>"),
    "bailingmoe2": Family(templates.LING, HERMES, "<|role_end|>", "on", "off"),
    "exaone-moe": Family(
        templates.EXAONE,
        JsonObjectCalls("<tool_call>", "</tool_call>"),
        "<|endofturn|>",
        OPENED,
        CLOSED,
    ),
    "falcon-h1": Family(
        templates.FALCON,
        JsonListCalls("<tool_call>", "</tool_call>", blank="\n"),
        "<|im_end|>",
        own_form=False,
    ),
    "hunyuan-moe": Family(
        templates.HUNYUAN, JsonListCalls("<tool_calls>", "</tool_calls>"), "<|eos|>", None, CLOSED
    ),
    "llama4": Family(templates.LLAMA4, LlamaCalls(), "<|eot|>"),
    "llama4 in Python": Family(templates.LLAMA4_PYTHON, PythonAnswer(), "<|eot|>"),
    "olmo2": Family(templates.OLMO, OLMO_CALLS, "<|im_end|>"),
}
WEATHER = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'}
NOON = {"name": "get_time", "arguments": "{}"}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def template(family) -> Iterator[ChatTemplate]:
    with ChatTemplate(family.template, source="m.gguf", bos_token="<s>") as opened:
        yield opened


@pytest.fixture(scope="module")
def dialect(template, model) -> Dialect:
    return tried_dialect(template, model.tokenizer)


def planned(template: ChatTemplate, dialect: Dialect, **fields: Any) -> ChatPlan:
    body = {"model": "m", "messages": MESSAGES, "tools": TOOLS, **fields}
    return plan_chat(converted(body, ChatRequest), template, dialect, "m")


def called(*functions: dict[str, str]) -> list[dict[str, Any]]:
    """A turn with calls, and their results."""
    calls = [
        {"id": f"call_{n}", "type": "function", "function": f} for n, f in enumerate(functions)
    ]
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": f"r{one['id']}"} for one in calls
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def written_calls(family: Family, plan: ChatPlan) -> str:
    """The calls of an earlier turn in a prompt, the first one of get_weather."""
    text = plan.prompt.text
    start = text.rindex(family.calls.begin, 0, text.rindex("get_weather"))
    return text[start : text.index(family.behind, start)]


def parts_of(plan: ChatPlan, text: str) -> Any:
    parser = ReplyParser(plan.form, b"id")
    pieces = [part for character in text for part in parser.feed(character)]
    return told([*pieces, *parser.finish()])


def test_the_syntax_is_found(family, dialect):
    assert dialect.calls == family.calls


def test_a_whole_conversation_reaches_the_model(template, dialect):
    """System text, tools, calls and results, each once."""
    system = {"role": "system", "content": "Be brief."}
    turns = [system, *MESSAGES, *called(WEATHER), {"role": "user", "content": "And then?"}]
    plan = planned(template, dialect, messages=turns)
    assert not plan.tools_described
    prompt = plan.prompt.text
    for text in ("Be brief.", "How warm is it?", "rcall_0", "And then?", "weather of the coming"):
        assert prompt.count(text) == 1, text
    assert "Oslo" in prompt.partition("How warm is it?")[2]
    assert prompt.count("<s>") <= 1


@pytest.mark.parametrize("functions", [(WEATHER,), (WEATHER, NOON)])
def test_what_the_template_writes_is_read(family, template, dialect, functions):
    """In single characters."""
    plan = planned(template, dialect, messages=[*MESSAGES, *called(*functions)])
    _, content, calls = parts_of(plan, written_calls(family, plan))
    assert [(name, json.loads(text)) for name, text in calls] == [
        (one["name"], json.loads(one["arguments"])) for one in functions
    ]
    assert content == ""


def test_a_forced_call_obeys_and_is_read(template, dialect, model, grammars):
    plan = planned(template, dialect, tool_choice="required", parallel_tool_calls=False)
    assert plan.grammar is not None
    ended = 0
    for seed, masks in enumerate(grammars.masks(plan.grammar, 6)):
        text = walk(model, masks, seed, [b"</think>"])
        if text is None:
            continue
        ended += 1
        _, content, ((name, arguments),) = parts_of(plan, text.decode(errors="replace"))
        check_call(name, arguments)
        assert content == ""
    assert ended


def test_forced_calls_have_the_form_of_the_template(family, template, model, grammars):
    """The grammar lets through, and may end behind, what the template writes for two calls."""
    many = not isinstance(family.calls, LlamaCalls)
    functions = (WEATHER, NOON) if many else (WEATHER,)
    plan = planned(template, Dialect(family.calls), messages=[*MESSAGES, *called(*functions)])
    rules = Dialect(family.calls).forced_calls(list(plan.form.functions.values()), many)
    (masks,) = grammars.masks(f"start: body\n{rules}", 1)
    left, tokens = written_calls(family, plan).encode(), list[int]()
    while left:
        spelled = {model.tokenizer.token_bytes(token): token for token in allowed(masks, tokens)}
        fitting = [piece for piece in spelled if piece and left.startswith(piece)]
        if not fitting:
            break
        tokens.append(spelled[max(fitting, key=len)])
        left = left.removeprefix(max(fitting, key=len))
    assert (not left) == family.own_form, left
    assert left or model.tokenizer.eog_ids.intersection(allowed(masks, tokens))


@pytest.mark.parametrize("switch", [True, False])
def test_reasoning_is_switched(family, template, dialect, switch):
    end = family.on if switch else family.off
    if end is None:
        return
    plan = planned(template, dialect, enable_thinking=switch)
    reasoning = dialect.reasoning
    assert reasoning is not None
    assert end.strip() in plan.prompt.text
    assert plan.form.thinking == (end == OPENED)
    assert reasoning.closed_by(plan.prompt.text) == (end == CLOSED)


@pytest.mark.parametrize("name", ["ernie4_5-moe", "hunyuan-moe"])
@pytest.mark.parametrize(
    ("text", "answer"),
    table(__file__, "test_family_templates")["marks_around_an_answer_are_not_shown"],
)
def test_marks_around_an_answer_are_not_shown(name, text, answer, model):
    """Whole and in two pieces, cut anywhere; other tags stay."""
    tag = "response" if name == "ernie4_5-moe" else "answer"
    with ChatTemplate(FAMILIES[name].template, source="m.gguf") as template:
        dialect = tried_dialect(template, model.tokenizer)
    text, form = text.format(tag), ReplyForm(dialect)
    for cut in range(len(text)):
        parser = ReplyParser(form)
        parts = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
        assert told(parts) == ("hm", answer.format(tag), [])


def test_calls_within_an_answers_marks_are_read(model):
    with ChatTemplate(templates.HUNYUAN, source="m.gguf") as template:
        dialect = tried_dialect(template, model.tokenizer)
        plan = planned(template, dialect)
    written = '[{"name": "get_time", "arguments": {}}]'
    text = f"<think>hm</think>\n<answer>\n<tool_calls>{written}</tool_calls>\n</answer>"
    assert parts_of(plan, text) == ("hm", "", [("get_time", "{}")])


@pytest.mark.parametrize(
    ("text", "city"),
    table(__file__, "test_family_templates")["llama_writes_json_or_a_list_in_python"],
)
def test_llama_writes_json_or_a_list_in_python(text, city, model):
    with ChatTemplate(templates.LLAMA4, source="m.gguf", bos_token="<s>") as template:
        plan = planned(template, tried_dialect(template, model.tokenizer))
    _, content, calls = parts_of(plan, text)
    assert content == ("" if city else text)
    assert [json.loads(arguments)["city"] for _, arguments in calls] == ([city] if city else [])


def test_calls_as_a_request_has_them_are_read(model):
    """Falcon H1's template shows earlier calls so."""
    with ChatTemplate(templates.FALCON, source="m.gguf") as template:
        plan = planned(template, tried_dialect(template, model.tokenizer))
    whole = json.dumps([{"type": "function", "id": "a", "function": json.loads(
        '{"name": "get_time", "arguments": {}}')}])  # fmt: skip
    assert parts_of(plan, f"<tool_call>\n{whole}\n</tool_call>")[2] == [("get_time", "{}")]


def test_another_syntax_in_known_tags_is_noticed(model):
    """Then the server describes the tools, and says so."""
    with ChatTemplate(templates.OTHER_SYNTAX, source="m.gguf") as template:
        dialect = tried_dialect(template, model.tokenizer)
        assert dialect.calls is None
        assert planned(template, dialect).tools_described
        assert not planned(template, dialect, tools=None).tools_described
    with ChatTemplate(templates.LLAMA4, source="m.gguf", bos_token="<s>") as template:
        assert tried_dialect(template, model.tokenizer).calls is not None


def test_results_stand_in_the_turn_of_apertus_calls():
    """So the answer ends behind its calls."""
    from harness.host.dialect.json_calls import KeyedJsonCalls
    from tests.serve.test_reply import FUNCTIONS

    parser = ReplyParser(ReplyForm(Dialect(KeyedJsonCalls()), FUNCTIONS))
    parts = parser.feed('<|tools_prefix|>[{"get_weather": {}}, {"get-time_2": {}}]')
    assert not parser.complete
    parts += parser.feed("<|tools_suffix|>[21]")
    assert parser.complete
    assert told([*parts, *parser.finish()]) == (
        "", "", [("get_weather", "{}"), ("get-time_2", "{}")],
    )  # fmt: skip
