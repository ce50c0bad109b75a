"""A grammar that forces a text of a hundred thousand characters is refused before it is written
out: llguidance takes 320 bytes of the server's memory for each of them, and seconds."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.host.dialect.calls import json_rule
from harness.host.structured.grammars import TOO_COMPLEX, GrammarRefused, Grammars, regex_rule
from harness.host.structured.regex_runs import LONGEST_COUNTED, MOST_FORCED, longest_run
from harness.host.structured.schema_tree import SchemaRefused
from reference.worker_process import WorkerProcess
from tests.serve.http import Http

COUNTED = [
    "(a{1000}){1000}", "a{100001}", "(ab){500000}", "((a{100}){100}){100}b", "[xy](a{1000}){1000}",
    "(a{1000}){1000}|b", "((a{1000}){1000})*", r"(?<n>\x{61}{1000}\/?){2}(?:\n{1000}){1000,}",
]  # fmt: skip
MEASURED = ["(ab|ab){100001}", "(aa?b?){0}[a]{9}(?i:1{100000})"]
WORK = ["[a-z]{1000000}", "a{0,1000000}", "(a{1000}b?){1000}", "(a?){1000000}", "(a|b{1000}){1000}"]


@pytest.mark.parametrize("regex", COUNTED)
def test_repeated_literals_are_counted(hermes, monkeypatch, regex):
    """In every field that takes a regular expression; no process compiles anything."""

    def asked(*_: object) -> None:
        raise AssertionError("it is compiled")

    monkeypatch.setattr(WorkerProcess, "ask", asked)
    monkeypatch.setattr(Grammars, "_matcher_of", asked)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": regex}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    keys = {"type": "object", "patternProperties": {regex: {}}, "additionalProperties": False}
    keyed = {"type": "json_schema", "json_schema": {"name": "x", "schema": keys}}
    plain = {"type": "regex", "regex": regex}
    for requested, says in (
        (plain, TOO_COMPLEX),
        (form, "pattern at /properties/a forces a text of more than 100,000 characters"),
        (keyed, "patternProperties at its root forces a text of more than 100,000 characters"),
    ):
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "response_format": requested}
        reply = Http(hermes.url).post("/v1/completions", body)
        assert (reply.status, reply.error["code"]) == (400, "unsupported_schema")
        assert reply.error["param"] == "response_format"
        assert says in reply.error["message"]
    grammar = 'root ::= "x"? (("a"{500} [bc]){20} | ("ab"{500}){500})'
    reply = Http(hermes.url).post("/v1/completions", {"prompt": "a", "grammar": grammar})
    assert (reply.status, reply.error["message"]) == (400, f"grammar {TOO_COMPLEX}")


@pytest.mark.parametrize(
    "rule", [*map(regex_rule, MEASURED), json_rule({"const": "ab" * (MOST_FORCED // 2)})]
)
def test_other_forced_texts_are_measured_elsewhere(grammars, monkeypatch, rule):
    """The process that compiles grammars writes them out, this one does not."""
    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "_matcher_of", lambda *_: pytest.fail("it is compiled here"))
        with pytest.raises(GrammarRefused, match=re.escape(TOO_COMPLEX)):
            grammars.masks(f"start: {rule}", 1)
    assert len(grammars.masks(f'start: "{"ab" * 1000}"', 1)) == 1


@pytest.mark.parametrize("regex", WORK)
def test_what_forces_no_long_text_works(grammars, regex):
    (masks,) = grammars.masks(f"start: {regex_rule(regex)}", 1)
    assert masks([]).any()


PIECES = st.sampled_from(["a", "b", r"\.", r"\x{41}", r"\d", "[ab]", ".", "$", "[^]x]", r"\/"])
COUNTS = st.sampled_from(["{2}", "{0}", "{3,}", "{1,4}", "*", "+", "?", "{0,2}", "{2}?"])
REGEXES = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.tuples(inner, COUNTS).map(lambda two: f"(?:{two[0]}){two[1]}"),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda some: f"({'|'.join(some)})"),
    ),
    max_leaves=8,
)


def written_out(regex: str) -> str:
    """All that a regular expression forces, with a space wherever there is a choice."""
    parsed = re.compile(r"\\x\{..\}|\\.|\[\^?\]?[^]]*\]|\(\?:|\{[^}]*\}\??|.")
    tokens = parsed.findall(regex)

    def branches(at: int) -> tuple[str, int]:
        found = []
        while True:
            parts: list[str] = []
            while at < len(tokens) and tokens[at] not in ("|", ")"):
                if tokens[at] in ("(", "(?:"):
                    text, at = branches(at + 1)
                    parts.append(text)
                elif tokens[at] in "*+?" or tokens[at][0] == "{":
                    parts[-1] = repeated(parts[-1], tokens[at])
                elif tokens[at] != "$":
                    choice = tokens[at] in (r"\d", ".") or tokens[at][0] == "["
                    parts.append(" " if choice else "x")
                else:
                    parts.append("")
                at += 1
            found.append("".join(parts))
            if at == len(tokens) or tokens[at] == ")":
                return found[0] if len(found) == 1 else f" {' '.join(found)} ", at
            at += 1

    return branches(0)[0]


def repeated(text: str, count: str) -> str:
    low, comma, high = {"*": "0,", "+": "1,", "?": "0,1"}.get(count, count.strip("{}?")).partition(
        ","
    )
    least = int(low)
    if comma and high != low:
        return f"{text * least} " if least else f" {text} "
    return text * least


@given(regex=REGEXES)
def test_a_run_is_counted_as_it_is_written_out(regex):
    assert longest_run(regex) == max(map(len, written_out(regex).split(" ")))


def test_what_cannot_be_read_is_left_to_the_compiler():
    for regex in ("(", ")", "(?i)a{9}", "(?=a{9})", "[", "\\", "a" * (LONGEST_COUNTED + 1)):
        assert longest_run(regex) in (0, 1)
    assert longest_run("a" * LONGEST_COUNTED) == LONGEST_COUNTED
    assert longest_run("(" * 300 + "a" + "){9}" * 300) == 9**300


def test_many_long_patterns_are_left_to_the_compiler():
    """Counting reads one character after another."""
    pattern = "(a{1000}){1000}"
    padded = pattern + "[ab]" * ((LONGEST_COUNTED - len(pattern)) // 4)
    with pytest.raises(SchemaRefused, match="pattern at its root"):
        json_rule({"type": "string", "pattern": padded})
    json_rule({"type": "string", "anyOf": [{"pattern": padded}, {"pattern": padded}]})
