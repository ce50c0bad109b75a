"""Values of options: one that is not what the option takes ends with one line that names it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from harness.cli.main import build_parser
from harness.cli.parser import Parser, actions
from harness.cli.tools_command import TOOLS
from harness.settings_table import SETTINGS
from tests.cli.test_bad_input import Zinc, refused

NO_NUMBERS = ("", " ", "x", "nan", "inf", "-inf", "1e400", "0x10", "1_000", " 5", "5 ", "٥", "1,,2")
NO_WHOLE_NUMBERS = (*NO_NUMBERS, "1.5", "1e3", "4Kx", "9" * 30, "-" + "9" * 30)
WORDS = {"path_argument": "a\0b", "names_of": " , "}
"""What parsers of other values than numbers refuse."""


def all_actions() -> Iterator[tuple[str, argparse.Action]]:
    """Every option and argument of every command and tool."""
    parsers = [build_parser()]
    for module, _ in TOOLS.values():
        parser = import_module(module).build_parser(prog=module)
        assert isinstance(parser, Parser)
        parsers.append(parser)
    for parser in parsers:
        for command, action in actions(parser):
            yield command.prog, action


def test_every_option_refuses_what_is_no_number_in_words() -> None:
    """A number is written with ASCII digits, and has no more than 64 bits or is finite; a refusal
    is a sentence, not the name of the function that parses."""
    seen = set()
    for prog, action in all_actions():
        if not callable(action.type):
            continue
        name = action.type.__name__
        seen.add(name)
        values = NO_NUMBERS if name in ("real_number", "_seconds") else NO_WHOLE_NUMBERS
        for value in (WORDS[name],) if name in WORDS else values:
            with pytest.raises(argparse.ArgumentTypeError, match=r"is not|names nothing"):
                print(prog, action.option_strings, value, action.type(value))
    assert {"whole_number", "real_number", *WORDS} <= seen


def test_a_number_of_a_setting_has_ascii_digits() -> None:
    numbers = [one.kind for one in SETTINGS.values() if {int, float} & {*one.kind.toml_types}]
    assert len(numbers) > 15
    for kind in numbers:
        for value in NO_NUMBERS:
            with pytest.raises(ValueError):  # noqa: PT011
                print(kind.accepts, value, kind.parse(value))


def test_what_an_option_refuses_is_named(zinc: Zinc, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    add = ("tenants", "add", "a", "--tenants", path)
    for words, said in (
        ((*add, "--models", ""), "--models"),
        ((*add, "--models=,"), "--models"),
        ((*add, "--max-slots", "1_0"), "--max-slots: '1_0' is not a whole number"),
        ((*add, "--weight", "inf"), "--weight: 'inf' is not a number"),
        (("stop", "1", "--timeout", "-1"), "--timeout"),
        (("tenants", "key", "--id=-1"), "--id"),
        (("tenants", "key", "--name="), "--name"),
        (("tenants", "key", "--name=a\nb"), "--name"),
        (("tenants", "key", "--id", "9" * 4000), "--id"),
    ):
        assert len(refused(zinc(*words), said)) < 300
    assert not path.exists()


@pytest.mark.parametrize("value", ["9" * 19, "9999999999"])
@pytest.mark.parametrize("flag", ["vocab", "layers", "hidden", "experts-count"])
def test_a_synthetic_model_has_counts_that_files_have(
    zinc: Zinc, tmp_path: Path, flag: str, value: str
) -> None:
    words = ("synth", "--arch", "qwen3moe", "--out", tmp_path / "m.gguf", f"--{flag}", value)
    refused(zinc(*words), flag.replace("-", "."), "at most")
