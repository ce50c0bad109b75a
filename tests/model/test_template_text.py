"""Texts that know who wrote them: each operation has the value ``str`` gives it, and each character
keeps the flag it had."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import TemplateError
from reference.model.chat_template import ChatTemplate, encode_chat
from reference.model.template_text import concat, literal, trusted_characters
from reference.model.tokenizer import load_tokenizer
from tests.model.rendering import TURNS, render
from tests.model.tokenizer_data import byte_level_metadata
from tests.tables import table

TRUSTED, PLAIN = "ABC{}%sd", "abc \n"
text = st.lists(
    st.one_of(st.text(TRUSTED, max_size=4).map(literal), st.text(PLAIN, max_size=4)), max_size=4
).map(concat)


def flags_of(value: str) -> list[bool]:
    """Whether each letter is trusted, as far as its case says so."""
    return [bool(flag) for flag in trusted_characters(value)]


def check(result: object, expected: object) -> None:
    """``result`` is ``expected``, and of its letters the upper ones are the template's."""
    assert result == expected
    for part in [result] if isinstance(result, str) else result:  # type: ignore[attr-defined]
        assert isinstance(part, str)
        for letter, flag in zip(part, flags_of(part), strict=True):
            if letter in "ABCabc":
                assert flag == (letter in "ABC")


@settings(deadline=None)
@given(text, text, st.integers(0, 12), st.sampled_from(["A", "b", " ", "AB", "\n"]))
def test_methods_keep_track(one, two, width, small):
    plain = str.__str__(one)
    for result, expected in (
        (one.split(), plain.split()),
        (one.rsplit(None, 1), plain.rsplit(None, 1)),
        (one.split(small), plain.split(small)),
        (one.splitlines(), plain.splitlines()),
        (one.splitlines(True), plain.splitlines(True)),
        (one.partition(small), plain.partition(small)),
        (one.rpartition(small), plain.rpartition(small)),
        (one.ljust(width), plain.ljust(width)),
        (one.rjust(width, "."), plain.rjust(width, ".")),
        (one.center(width), plain.center(width)),
        (one.zfill(width), plain.zfill(width)),
        (one.replace("", two), plain.replace("", str.__str__(two))),
        (one.replace("", two, 2), plain.replace("", str.__str__(two), 2)),
    ):
        check(result, expected)


FORMS = ["%s", "<%s>%s", "%5s|%-5s|", "%.2s%%", "%*s%s", "%s%d", "%(x)s%(y)5s", "{%s}", "", "%%"]
BRACES = ["{}", "<{}>{}", "{0}{1}{0}", "{:5}|{:>5}|", "{:^7.2}", "{{{}}}{{", "{x}{y!s:_<6}", "}}{}"]


@settings(deadline=None)
@given(text, text, st.sampled_from(FORMS))
def test_percent_formatting_keeps_track(one, two, bucket):
    by_name = {"x": one, "y": two}
    for values in ((), (one,), (one, two), (7, one, two), (one, 3), by_name):
        if values is by_name and "%(" not in bucket:
            continue
        plain = (
            {key: str.__str__(value) for key, value in values.items()}
            if isinstance(values, dict)
            else tuple(str.__str__(v) if isinstance(v, str) else v for v in values)
        )
        try:
            expected = bucket % plain
        except (TypeError, KeyError, ValueError) as error:
            with pytest.raises(type(error)):
                literal(bucket) % values
        else:
            check(literal(bucket) % values, expected)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(BRACES), st.text("ab{}<", max_size=4))
def test_brace_formatting_has_pythons_values(bucket, content):
    """Rendered as a template, where the fields are the conversation's and the rest is not."""
    source = (
        f"{{{{ {bucket!r}.format(messages[0].content, '<A>', x='<B>', y=messages[0].content) }}}}"
    )
    rendered = render(source, [{"role": "user", "content": content}])
    assert rendered.text == bucket.format(content, "<A>", x="<B>", y=content)
    trusted = "".join(rendered.text[start:end] for start, end in rendered.template_spans)
    assert trusted.count("A") == rendered.text.count("A")
    assert "a" not in trusted
    assert "b" not in trusted


OPENINGS = [
    *("'<|im_start|>{}'.format(m.role)", "'<|im_start|>%s' % m.role"),
    *("'<|im_start|>%s' | format(m.role)", "'<|{}|>{}'.format('im_start', m.role)"),
    *("'<|%s|>' % 'im_start' ~ m.role", "'{:>12}'.format('<|im_start|>') ~ m.role"),
    *("('<|im_start|>' ~ m.role) | indent", "('<|im_start|>' ~ m.role) | safe"),
    *("'<|im_start|>{r}'.format(**{'r': m.role})", "'<|im_start|>{0[role]}'.format(m)"),
    *("'<|im_start|>{0.role}'.format(m)", "' <|im_start|> '.split()[0] ~ m.role"),
    *("'<|im_start|>\n'.splitlines()[0] ~ m.role", "'x<|im_start|>'.partition('x')[2] ~ m.role"),
    *("'<|IM_START|>'.swapcase() ~ m.role", "(('<|im_start|>' ~ m.role) | tojson)[1:-1]"),
    "('Q' ~ m.content[:0] ~ m.role).replace('Q', '<|im_start|>')",
    "(m.content[:0] ~ 'Q') | replace('Q', '<|im_start|>') ~ m.role",
    "m.content[:0].join(['<|im_start|>', m.role])",
    "(m.content[:0].center(1)).replace(' ', '<|im_start|>') ~ m.role",
    "({'a': ['<|im_start|>' ~ m.role], 'b': m.content} | tojson)[8:24]",
    "([m.content, '<|im_start|>' ~ m.role] | tojson(ensure_ascii=true)).split('\"')[3]",
]


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_control_token_that_a_template_builds_is_one(opening):
    """And one that the conversation writes into the same place is none."""
    source = (
        f"{{% for m in messages %}}{{{{ {opening} }}}}\n{{{{ '%s' % m.content }}}}{{% endfor %}}"
    )
    tokenizer = load_tokenizer(byte_level_metadata([], ["<|im_start|>"]), "m.gguf")
    with ChatTemplate(source, source="m.gguf") as template:
        for content in ("hi", "<|im_start|>", "%s{}<|im_start|>"):
            ids = encode_chat(tokenizer, template, [{"role": "user", "content": content}])
            assert ids.count(256) == 1
            assert ids[ids.index(256) + 1 :][:4] == list(b"user")
            assert content.encode() in tokenizer.decode_bytes(ids, special=True)


@pytest.mark.parametrize(
    ("expression", "trusted"),
    table(__file__, "test_template_text")[
        "what_a_template_puts_into_a_text_of_the_conversation_is_its_own"
    ],
)
@pytest.mark.parametrize("content", ["axb", "@0@xb", '@x"@@1@@'])
def test_what_a_template_puts_into_a_text_of_the_conversation_is_its_own(
    expression, trusted, content
):
    source = "{% set c = messages[0].content %}{{ " + expression + " }}"
    rendered = render(source, [{"role": "user", "content": content}])
    found = "".join(rendered.text[start:end] for start, end in rendered.template_spans)
    if "ljust" in expression:
        trusted = "." * (5 - len(content))
    assert found == trusted


@pytest.mark.parametrize(
    ("expression", "names"),
    table(__file__, "test_template_text")["an_operation_that_cannot_be_followed_is_named"],
)
def test_an_operation_that_cannot_be_followed_is_named(expression, names):
    with pytest.raises(TemplateError, match=names):
        render("{{ " + expression + " }}", TURNS)
