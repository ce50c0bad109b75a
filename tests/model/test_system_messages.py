"""System messages that agents send, several at the beginning and others later, reach the model in
every template, by way of the user where it takes none."""

from typing import Any

import pytest

from contract.errors import TemplateRefused
from tests.model.test_template_forms import every, text_of
from tests.needs import need_file
from tests.paths import CHAT_TEMPLATES

ONE_AT_THE_BEGINNING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system message, at the beginning') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FIRST_ALONE = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ CONTENT }}{% endfor %}"
)
TAKES_NONE = {
    "refused": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + ALTERNATING.replace("CONTENT", "m.content"),
    "alternating": ALTERNATING.replace("CONTENT", "m.content"),
    "parts": ALTERNATING.replace("CONTENT", "m.content[0].text"),
    "left out": "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}",
}
ANYWHERE = every("{{ m.content }}")
SYSTEM = {"role": "system", "content": "S1"}
OTHER: dict[str, Any] = {"role": "system", "content": [{"type": "text", "text": "S2"}]}
USER = {"role": "user", "content": "U"}
ANSWER = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize("source", [ONE_AT_THE_BEGINNING, FIRST_ALONE])
def test_a_template_of_one_gets_one(source):
    """Those at the beginning are one text; a later one is the user's, where it stands."""
    assert text_of(source, [SYSTEM, USER]) == "[system]S1[user]U"
    assert text_of(source, [SYSTEM, OTHER, USER]) == "[system]S1\n\nS2[user]U"
    turns = [SYSTEM, OTHER, USER, SYSTEM, ANSWER, OTHER]
    assert text_of(source, turns) == "[system]S1\n\nS2[user]U[user]S1[assistant]A[user]S2"
    assert text_of(source, [USER, SYSTEM, USER]) == "[user]U[user]S1[user]U"
    assert text_of(source, [SYSTEM, {"role": "system", "content": ""}]) == "[system]S1"


def test_a_template_of_many_gets_them_as_they_are():
    turns = [SYSTEM, OTHER, USER, SYSTEM, ANSWER, OTHER]
    assert text_of(ANYWHERE, turns) == "[system]S1[system]S2[user]U[system]S1[assistant]A[system]S2"


def test_what_is_no_text_is_left_to_the_template():
    picture = {"role": "system", "content": [{"type": "image"}]}
    for source, words in ((ONE_AT_THE_BEGINNING, "beginning"), (TAKES_NONE["refused"], "no")):
        with pytest.raises(TemplateRefused, match=words):
            text_of(source, [picture, SYSTEM, picture, USER])


@pytest.mark.parametrize("name", TAKES_NONE)
def test_a_template_of_none_gets_them_in_the_words_of_the_user(name):
    """In front of what the user says next, with it one turn; all else is as it was."""
    source = TAKES_NONE[name]
    assert text_of(source, [SYSTEM, USER]) == "[user]S1\n\nU"
    assert text_of(source, [SYSTEM, OTHER, USER, ANSWER]) == "[user]S1\n\nS2\n\nU[assistant]A"
    turns = [SYSTEM, USER, ANSWER, OTHER, USER, SYSTEM, ANSWER, USER, OTHER, USER]
    assert text_of(source, turns) == (
        "[user]S1\n\nU[assistant]A[user]S2\n\nU\n\nS1[assistant]A[user]U\n\nS2\n\nU"
    )
    assert text_of(source, [SYSTEM, ANSWER, USER]) == "[user]S1[assistant]A[user]U"
    assert text_of(source, [{"role": "system", "content": ""}, USER]) == "[user]U"
    assert text_of(source, [SYSTEM]) == "[user]S1"
    assert text_of(source, [USER, ANSWER]) == "[user]U[assistant]A"


@pytest.mark.parametrize("name", TAKES_NONE)
def test_turns_of_the_user_alone_are_not_joined(name):
    """A template that refuses them says so."""
    if name == "left out":
        assert text_of(TAKES_NONE[name], [SYSTEM, USER, USER]) == "[user]S1\n\nU[user]U"
    else:
        with pytest.raises(TemplateRefused, match="alternate"):
            text_of(TAKES_NONE[name], [SYSTEM, USER, USER])


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "google-gemma-2-2b-it", "google-gemma-4-31B-it"]
)
def test_real_templates_print_all_of_them(name):
    """In the order they were sent, as agents send them."""
    source = need_file(CHAT_TEMPLATES / f"{name}.jinja").read_text()
    texts = [f"told {n}" for n in range(5)]
    roles = ["system", "system", "user", "system", "user"]
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    rendered = text_of(source, turns)
    indices = [rendered.find(text) for text in texts]
    assert -1 not in indices
    assert indices == sorted(indices)
