"""Help is short and grouped, complete on request, and no wider than a terminal."""

import argparse
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from harness.cli.main import COMMANDS, build_parser
from harness.cli.parser import Parser, commands, named_parser
from harness.cli.tools_command import TOOLS
from harness.settings_table import GROUPS, SETTINGS

COLUMNS = 80
OWN = [name for name in COMMANDS if name not in TOOLS]
METAVARS = {
    *("ADDRESS", "DIR", "FILE", "HOST", "KEY", "MODEL", "NAME", "NUMBER", "N", "NAME|N", "ORIGIN"),
    *("ID", "RATE", "REASON", "SECONDS", "SERVER", "SIZE", "TENANT", "TEXT", "TOKENS", "TRACE"),
    *("TYPE", "URL", "WIDTH", "WORD", "LAYER", "COMMAND", "ACTION", "ACTION[/PROMPT[/TOKENS]]"),
    *("SCHEMA", "GRAMMAR", "REGEX"),
    *("[MODEL] PROMPT", "RECEIPT|REQUEST", "RESPONSE"),
}
"""What a value of an option can be, as the help names it."""
TEXTS = ("system", "stop", "prompt", "prompt_flag")
"""The options whose value is a text to read, and no name of anything."""
MANY = re.compile(r"\[,[^]]+\]$")
PLAIN_OPTIONS = ("help", "help_all", "version", "debug", "silent")


def tool_parser(name: str) -> Parser:
    """The parser of a tool, as ``zinc-rt NAME`` makes it."""
    made = import_module(TOOLS[name][0]).build_parser(f"zinc-rt {name}")
    assert isinstance(made, Parser)
    return made


def all_parsers() -> Iterator[Parser]:
    """The root, every command and tool, and the commands that only group others."""
    root = build_parser()
    groups = (named_parser(root, [name])[0] for name in OWN)
    for parser in dict.fromkeys((root, *commands(root), *groups)):
        if isinstance(parser, Parser) and parser.prog.split()[-1] not in TOOLS:
            yield parser
    yield from map(tool_parser, TOOLS)


def test_no_line_is_wider_than_a_terminal():
    for parser in all_parsers():
        for text in (parser.format_help(), parser.format_help(complete=True)):
            wide = [line for line in text.splitlines() if len(line) > COLUMNS and "/" not in line]
            assert wide == [], parser.prog


def test_every_description_is_a_sentence():
    for parser in all_parsers():
        described = parser.format_help().split("\n\n")[1]
        assert re.match(r"[A-Z]", described), parser.prog
        assert described.endswith("."), parser.prog


def test_every_help_shows_how_the_command_is_called():
    for parser in all_parsers():
        shown = [line for line in parser.format_help().splitlines() if line.startswith("  ")]
        assert any(parser.prog in line for line in shown), parser.prog


def test_every_value_is_named_after_what_it_is():
    """No option shows the name of a variable, and TEXT is a text."""
    for parser in all_parsers():
        for action in parser._actions:
            if action.nargs == 0 or action.help is argparse.SUPPRESS:
                continue
            name = str(action.metavar)
            known = name in METAVARS or MANY.sub("", name) in METAVARS
            listed = action.choices is not None and len(action.choices) < 6
            setting = action.dest in SETTINGS and name == SETTINGS[action.dest].kind.metavar
            assert known or listed or (setting and "{" in name), (parser.prog, action.dest, name)
            assert (name == "TEXT") <= (action.dest in TEXTS), (parser.prog, action.dest)
    assert SETTINGS["model"].kind.metavar == "NAME"


def test_every_option_is_in_a_group_and_says_what_it_is():
    """The options left without a group are those that every command has."""
    for parser in all_parsers():
        for action in parser._actions:
            said = action.help or isinstance(action, argparse._SubParsersAction)
            assert said, (parser.prog, action.dest)
        (options,) = (group for group in parser._action_groups if group.title == "options")
        left = [action.dest for action in options._group_actions]
        assert [dest for dest in left if dest not in PLAIN_OPTIONS] == [], parser.prog


@pytest.mark.parametrize("name", ["bench", "synth", "validate", "conformance", "replay"])
def test_help_of_a_tool_is_short_and_complete(zinc, name):
    short, complete = zinc(name, "--help").out, zinc(name, "--help-all").out
    assert len(short.splitlines()) < 0.75 * len(complete.splitlines())
    assert len(short.splitlines()) < 60
    assert f"zinc-rt {name} --help-all" in short
    assert "--cache-dir" not in short
    assert ("[env ZINC_RT_CACHE_DIR]" in " ".join(complete.split())) == (name != "synth")
    assert "--debug" in complete


@pytest.mark.parametrize("name", list(TOOLS))
def test_a_wrong_flag_of_a_tool_is_one_line(zinc, name):
    result = zinc(name, "--no-such-flag")
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert f"zinc-rt {name} --help" in result.err


@pytest.mark.parametrize("name", ["run", "serve", "chat"])
def test_help_is_in_groups_short_and_complete(zinc, name):
    short, complete = zinc(name, "--help").out, zinc(name, "--help-all").out
    order = [f"\n{group}:\n" for group in GROUPS if f"\n{group}:\n" in complete]
    assert len(order) >= 5
    assert sorted(order, key=complete.index) == order
    assert len(short.splitlines()) < 0.75 * len(complete.splitlines())
    assert f"zinc-rt {name} --help-all" in short
    rare = SETTINGS["prefix_cache"].flag
    assert rare not in short
    assert rare in complete
    assert "[env " not in short
    assert "[env ZINC_RT_PREFIX_CACHE]" in complete


def test_every_setting_is_in_one_group():
    names = [setting.name for group in GROUPS.values() for setting in group]
    assert sorted(names) == sorted(SETTINGS)


@pytest.mark.parametrize("name", [name for name in OWN if name not in ("tenants", "config")])
def test_help_of_a_command_is_its_help(zinc, name):
    assert zinc("help", name).out == zinc(name, "--help").out != ""


@pytest.mark.parametrize("name", list(TOOLS))
def test_tools_name_themselves_as_they_were_called(zinc, name):
    text = zinc("help", name).out
    assert text.startswith(f"usage: zinc-rt {name} ")


def test_help_of_a_nested_command(zinc):
    assert zinc("help", "model", "use").out == zinc("model", "use", "--help").out
    assert "no command or flag" in zinc("help", "model", "nonsense").err


@pytest.mark.parametrize("word", ["prefix", "--seed", "ZINC_RT_SEED", "ctx-size"])
def test_any_other_word_is_searched(zinc, word):
    assert "zinc-rt run" in zinc("help", word).out


def test_settings_read_as_sentences_of_the_field():
    """No help text uses a word that means something else to a reader."""
    odd = re.compile(r"\b(beside|told|place|wanted|mend|whoever|sooner|kept|asked for|a look)\b")
    for setting in SETTINGS.values():
        assert not setting.help.endswith("."), setting.name
    for parser in all_parsers():
        for action in parser._actions:
            assert not odd.search(str(action.help)), (parser.prog, action.dest, action.help)
        assert not odd.search(f"{parser.description} {parser.epilog}"), parser.prog
