"""Values of options: one that is not what the option takes ends with one line that names it."""

import argparse
from collections.abc import Iterator
from importlib import import_module

import pytest

from harness.cli.main import build_parser
from harness.cli.parser import Parser, actions
from harness.cli.tools_command import TOOLS
from harness.named_adapters import named_adapters
from harness.settings_table import SETTINGS
from tests.cli.test_bad_input import refused

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


def test_every_option_refuses_what_is_no_number_in_words():
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


def test_a_number_of_a_setting_has_ascii_digits():
    numbers = [one.kind for one in SETTINGS.values() if {int, float} & {*one.kind.toml_types}]
    assert len(numbers) > 15
    for kind in numbers:
        for value in NO_NUMBERS:
            with pytest.raises(ValueError):  # noqa: PT011
                print(kind.accepts, value, kind.parse(value))


def test_what_an_option_refuses_is_named(zinc, tmp_path):
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
        ((*add, "--ledger", "x" * 256), "--ledger: "),
        (("tenants", "usage", "--tenants", path, "--ledger", "é" * 128), "--ledger: "),
        (("receipts", "list", "--receipts", "x" * 256), "--receipts: "),
        (("bench", "--rates", "٥"), "--rates: "),
        (("bench", "--rate", "-1"), "--rate: is for --server"),
        (("bench", "--serve", "--clients", "3"), "--clients: is for --server"),
        (("score", "--prompt", "a", "--force-tokens", "٥"), "--force-tokens: "),
    ):
        assert len(refused(zinc(*words), said)) < 600
    assert not path.exists()


@pytest.mark.parametrize("value", ["9" * 19, "9999999999"])
@pytest.mark.parametrize("flag", ["vocab", "layers", "hidden", "experts-count"])
def test_a_synthetic_model_has_counts_that_files_have(zinc, tmp_path, flag, value):
    words = ("synth", "--arch", "qwen3moe", "--out", tmp_path / "m.gguf", f"--{flag}", value)
    refused(zinc(*words), flag.replace("-", "."), "at most")


def test_a_variable_named_almost_like_a_setting_is_told(zinc, monkeypatch):
    """Not one of another purpose, and none that is empty."""
    for name in ("SLOT", "MAXTOKENS", "CTX_SIZE", "Threads"):
        monkeypatch.setenv(f"ZINC_RT_{name}", "4")
    for name in ("SLOTS", "TEST_DATA", "DEBUG", "CC", "NATIVE_VARIANT", "CONFIG", "TENANT"):
        monkeypatch.setenv(f"ZINC_RT_{name}", "4" if name == "SLOTS" else "")
    monkeypatch.setenv("ZINC_RT_TEST_DATA", "a")
    said = [line for line in zinc("tenants", "key").err.splitlines() if "variable" in line]
    told = {line.split()[3]: line.split()[-1] for line in said}
    assert told == {
        "ZINC_RT_CTX_SIZE": "ZINC_RT_CONTEXT?",
        "ZINC_RT_MAXTOKENS": "ZINC_RT_MAX_TOKENS?",
        "ZINC_RT_SLOT": "ZINC_RT_SLOTS?",
        "ZINC_RT_Threads": "ZINC_RT_THREADS?",
    }
    assert zinc("tenants", "key", "--quiet").err == ""


def test_names_that_no_request_could_have_are_refused(zinc):
    """An argument's bytes that are no UTF-8, and hosts that have no address."""
    refused(zinc("serve", "--alias", "caf\udce9", "--port", 0), "--alias", "names in UTF-8")
    for host in ("caf\udce9", "a..b", "a" * 64):
        refused(zinc("chat", "--server", f"http://{host}"), "not the address of a server")
    assert named_adapters("caf\udce9.gguf")[0].name == "caf\\xe9"


def test_flags_of_the_other_side_of_a_conversation_are_refused(zinc):
    for words in (("--tier", "cpu"), ("--context", "64"), ("--lora", "x"), ("--draft", "1")):
        refused(zinc("chat", "--server", "http://127.0.0.1:1", *words), words[0], "the server's")
    refused(zinc("chat", "--model", "x.gguf", "--key", "k"), "--key", "--server")


def test_every_accepted_sampling_setting_can_be_used(zinc, tiny_model):
    """A top-p of 0 is the least there is, as over HTTP."""
    words = ("run", "--raw", "hi", "--model", tiny_model, "--max-tokens", 1, "--temperature", 1)
    for name in ("top_p", "min_p", "temperature", "top_k", "repeat_penalty", "repeat_last_n"):
        setting = SETTINGS[name]
        for value in ("0", "0.001", "0.01", "1", "100", "2147483647"):
            try:
                setting.kind.parse(value)
            except ValueError:
                continue
            assert zinc(*words, setting.flag, value).code == 0, (name, value)
