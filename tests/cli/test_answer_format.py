"""``run`` holds an answer to a schema, a grammar or a regular expression, as the server does."""

import json
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.cli.conftest import Result, Zinc
from tests.refused_processes import REFUSAL, refuse_grammars

SCHEMA = '{"enum": ["yes", "no"]}'
GRAMMAR = 'root ::= "yes" | "no"'


@pytest.fixture
def hold(zinc, tiny_model) -> Zinc:
    """Runs a short prompt with further flags."""

    def run(*words: object) -> Result:
        return zinc("run", "hi", "--model", tiny_model, "--max-tokens", 60, *words)

    return run


def test_every_flag_holds_the_answer(hold, tmp_path):
    """As a text and from a file, with and without a template; --json has the same text."""
    schema, grammar = tmp_path / "s.json", tmp_path / "g.gbnf"
    schema.write_text(SCHEMA)
    grammar.write_text(GRAMMAR)
    for flag, values, allowed in (
        ("--json-schema", (SCHEMA, schema), ("yes", "no")),
        ("--grammar", (GRAMMAR, grammar), ("yes", "no")),
        ("--regex", ("yes|no",), ("yes", "no")),
    ):
        for raw in ((), ("--raw",)):
            answers = [hold(flag, value, *raw) for value in values]
            assert {(one.code, one.out) for one in answers} == {(0, answers[0].out)}
            text = answers[0].out.removesuffix("\n")
            assert (json.loads(text) if flag == "--json-schema" else text) in allowed
            document = json.loads(hold(flag, values[0], *raw, "--json").out)
            assert (document["text"], document["finish_reason"]) == (text, "stop")
    for flag in ("-j", "-jf", "--format", "--json_schema"):
        assert hold(flag, schema).out == hold("--json-schema", schema).out


def test_any_object(hold):
    assert hold("--format", "json").out.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--json-schema", "{"), "--json-schema: is not JSON: "),
        (("--json-schema", "gone.json"), "--json-schema gone.json: cannot be read: No such file"),
        (("--json-schema", "bad.json"), "--json-schema bad.json: is not JSON: "),
        (("--json-schema", "empty.json"), "--json-schema empty.json: is empty"),
        (("--json-schema", "bytes.json"), "--json-schema bytes.json: byte 1 is not UTF-8"),
        (("--json-schema", '{"not": {}}'), "--json-schema: "),
        (("--grammar", "root ::= other"), "--grammar: "),
        (("--grammar", "."), "--grammar .: cannot be read: "),
        (("--grammar", ""), "--grammar: is empty"),
        (("--regex", ""), "--regex: is empty"),
        (("--regex", "a\\"), "--regex: cannot be enforced: its last character is a backslash"),
        (("--regex", "a", "--grammar", GRAMMAR), "not allowed with argument"),
    ],
)
def test_errors_name_the_flag_and_the_file_before_a_model_is_opened(
    zinc, tmp_path, monkeypatch, words, said
):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("[1, 2")
    Path("empty.json").touch()
    Path("bytes.json").write_bytes(b"{\xff}")
    for command in ("run", "chat"):
        prompt = ("hi",) if command == "run" else ()
        result = zinc(command, *prompt, "--model", "gone.gguf", *words)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert said in result.err
        assert "response_format" not in result.err


def test_what_a_vocabulary_cannot_do_names_the_flag(hold):
    for flag, value in (("--regex", "("), ("--json-schema", '{"type": "strin"}')):
        result = hold(flag, value)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"error: {flag}: cannot be enforced: ")


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_a_process_that_the_system_refuses_is_said_in_plain_words(hold, monkeypatch, raw):
    """It is no fault of the flag, and there is no server whose log says more."""
    refuse_grammars(monkeypatch)
    result = hold("--regex", "yes|no", *raw)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: grammars: {REFUSAL}\n"


def test_a_text_that_fails_ends_its_line(hold):
    """Of rules whose only text has no end, what is told follows what was printed."""
    result = hold("--grammar", 'root ::= "a" root')
    assert (result.code, result.out.strip("a")) == (2, "\n"), result.err
    assert "the grammar became too complex" in result.err


def test_a_conversation_is_held_too(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("harness.cli.chat.piped_turns", lambda: iter(["hi", "and now?"]))
    assert main(["chat", "--model", str(tiny_model), "-q", "--regex", "yes|no"]) == 0
    assert set(capsys.readouterr().out.split()) <= {"yes", "no"}
