"""Messages reach a template in the forms it takes, which are found out by trying it."""

from typing import Any

import pytest

from reference.model.chat_template import ChatTemplate
from tests.needs import need_file
from tests.paths import CHAT_TEMPLATES

PARTS = (
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
)
FIRST = "{{ m.content[0].text }}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
PLAIN = "{{ m.content }}"
JOINED = "{{ '<' + m.content + '>' }}"
MAPPED = "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"
ITERABLE = (
    "{% if m.content is iterable and m.content is not string %}" + PARTS + "{% else %}"
    "{{ m.content }}{% endif %}"
)
CONTENTS = {
    "parts": PARTS, "first": FIRST, "either": EITHER, "plain": PLAIN, "joined": JOINED,
    "mapped": MAPPED, "iterable": ITERABLE,
}  # fmt: skip


def every(body: str) -> str:
    return "{% for m in messages %}[{{ m.role }}]" + body + "{% endfor %}"


def text_of(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    with ChatTemplate(source, source="m.gguf", bos_token="<s>", eos_token="</s>") as template:
        return template.render(messages, **options).text


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize(
    "content", ["", "PING", [{"type": "text", "text": "PING"}], [{"type": "text", "text": "a"}] * 2]
)
def test_content_comes_out_in_either_form(name, role, content):
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": content}]
    text = text_of(every(CONTENTS[name]), messages)
    if isinstance(content, list) and len(content) > 1:
        expected = "a" if name == "first" else "aa"
    else:
        expected = "PING" if content else ""
    assert text.split("]")[-1].strip("<>") == expected


def test_each_role_has_its_own_form():
    """As in templates of models that see, where a system message is a text."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ '(' + m.content + ')' }}"
        "{% elif m.role == 'user' %}" + PARTS + "{% else %}" + PLAIN + "{% endif %}{% endfor %}"
    )
    texts = ["S", "U", "A", "V"]
    roles = ["system", "user", "assistant", "user"]
    for wrap in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        messages = [{"role": r, "content": wrap(t)} for r, t in zip(roles, texts, strict=True)]
        assert text_of(source, messages) == "(S)UAV"


def test_other_parts_are_left_to_the_template():
    image = [{"type": "image"}, {"type": "text", "text": "a"}]
    source = every("{% for p in m.content %}{{ p.type }}{{ p.text }}{% endfor %}")
    assert text_of(source, [{"role": "user", "content": image}]) == "[user]imagetexta"


def test_alternating_roles_are_no_hindrance():
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + PARTS + "{% endfor %}"
    )
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert text_of(source, turns) == "userassistantuser"


CALLS = (
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}"
)
TEXT_CALLS = CALLS.replace(" | tojson", "")
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING = {
    "is none": "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "== none": "{% if m.content == None %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "not content": "{% if not m.content %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "empty": "{% if m.content == '' %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "printed": "{{ m.content }}{% if m.tool_calls %}" + CALLS + "{% endif %}",
    "in": "{% if 'x' not in m.content %}{{ m.content }}" + CALLS + "{% endif %}",
    "trimmed": "{{ m.content.strip() }}{% if m.tool_calls %}" + CALLS + "{% endif %}",
    "parts": (
        "{% if m.content[0].type == 'image' %}!{% endif %}" + PARTS + "{% if m.tool_calls %}"
        + CALLS + "{% endif %}"
    ),
    "undefined": "{% if m.content is defined %}{{ m.content }}{% else %}" + CALLS + "{% endif %}",
    "text": "{{ m.content or '' }}{% if m.tool_calls %}" + TEXT_CALLS + "{% endif %}",
    "text is none": (
        "{% if m.content is none %}" + TEXT_CALLS + "{% else %}{{ m.content }}{% endif %}"
    ),
    "items": (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ '{' }}"
        "{% for k, v in c.function.arguments.items() %}\"{{ k }}\": {{ v }}{% endfor %}}>"
        "{% endfor %}"
    ),
    "either": (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}>{% endfor %}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_are_printed_whatever_stands_beside_them(name, content, as_text):
    """null, nothing or an empty text; arguments as an object, or as its text."""
    function = {"name": "f", "arguments": '{"a": 1}' if as_text else {"a": 1}}
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    if content != "absent":
        turn["content"] = content
    text = text_of(every(CALLING[name]), [{"role": "user", "content": "go"}, turn])
    assert text == '[user]go[assistant]<f {"a": 1}>'


@pytest.mark.parametrize("name", ["is none", "== none", "empty", "undefined"])
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_a_template_that_prints_names_of_calls_alone_prints_them(name, content):
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL], "content": content}
    if content == "absent":
        del turn["content"]
    source = CALLING[name].replace(CALLS, "<{{ m.tool_calls[0].function.name }}>")
    assert text_of(every(source), [{"role": "user", "content": "go"}, turn]).endswith("<f>")


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "google-gemma-4-31B-it"])
def test_real_templates_print_calls_beside_null_as_beside_an_empty_text(name):
    source = need_file(CHAT_TEMPLATES / f"{name}.jinja").read_text()
    call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    texts = set()
    for content in (None, ""):
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        texts.add(text_of(source, [{"role": "user", "content": "go"}, turn]))
    assert len(texts) == 1
    (text,) = texts
    assert "weather" in text
    assert "Oslo" in text
    assert "None" not in text


def test_empty_arguments_are_an_empty_object():
    for arguments in ("", "  ", "{}"):
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        for name in ("printed", "text"):
            assert text_of(every(CALLING[name]), [turn]).endswith("<f {}>")


@pytest.mark.parametrize(
    ("body", "takes"),
    [
        (every(PLAIN), True),
        (every(PARTS), True),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", False),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_whether_a_template_takes_a_system_message(body, takes):
    with ChatTemplate(body, source="m.gguf") as template:
        assert template.takes_system == takes


def refusing(condition: str) -> str:
    """The beginning of a template that refuses conversations."""
    return "{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}"


DEMANDING = {
    "a system message first": refusing("messages[0].role != 'system'"),
    "three turns": refusing("messages | length < 3"),
    "a user's turn last": refusing("messages[-1].role != 'user'"),
}
"""Beginnings of templates that refuse short conversations."""


@pytest.mark.parametrize("name", DEMANDING)
@pytest.mark.parametrize("body", [PARTS, PLAIN, PARTS.replace("p['text']", "p.text | upper")])
@pytest.mark.parametrize("parts", [False, True])
def test_a_template_that_refuses_short_conversations_is_tried_with_longer_ones(name, body, parts):
    roles = ["system", "user", "assistant", "user"]
    texts = ["SYS", "ONE", "TWO", "SIX"]
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
        for role, text in zip(roles, texts, strict=True)
    ]
    rendered = text_of(DEMANDING[name] + every(body), messages)
    assert rendered == "".join(f"[{r}]{t}" for r, t in zip(roles, texts, strict=True))


SHOWN = (
    "{% if m.tool_calls and m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
)
AROUND_CALLS = {
    "a result follows": "{% for m in messages %}"
    + refusing("m.tool_calls and (loop.last or messages[loop.index0 + 1].role != 'tool')")
    + "{% endfor %}"
    + every(SHOWN),
    "not at the end": every(SHOWN.replace("is none", "is none and not loop.last")),
    "a system message first": refusing("messages[0].role != 'system'") + every(SHOWN),
}


@pytest.mark.parametrize("name", AROUND_CALLS)
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_calls_are_printed_whatever_has_to_stand_around_them(name, content):
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "absent":
        del turn["content"]
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "go"},
        turn,
        {"role": "tool", "content": "done", "tool_call_id": "abcdefghi", "name": "f"},
    ]
    rendered = text_of(AROUND_CALLS[name], messages)
    assert rendered == '[system]be[user]go[assistant]<f {"a": 1}>[tool]done'
