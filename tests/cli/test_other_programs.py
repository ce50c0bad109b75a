"""What users of other programs type is understood, or answered with what to type instead."""

import argparse
import re

import pytest

from contract.errors import ConfigError
from harness.catalog import pasted_name
from harness.cli.foreign_flags import own_spelling, refuse_foreign_flags
from harness.cli.main import COMMANDS, build_parser
from harness.cli.parser import commands, flags_of, named_parser
from harness.cli.suggestions import SAME_COMMANDS, names_model
from harness.other_programs import advice
from harness.settings_table import SETTINGS
from tests.cli.terminal import terminal

ADVICE, ADVISED_COMMANDS = advice("flags"), advice("commands")


def settings_of(*words: str) -> dict[str, object]:
    return vars(build_parser(["run", "serve"]).parse_args(list(words)))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("-n", "5"), "max_tokens"),
        (("--n-predict", "5"), "max_tokens"),
        (("-t", "5"), "threads"),
        (("-c", "5"), "context"),
        (("--ctx-size", "5"), "context"),
        (("--max-model-len", "5"), "context"),
        (("--temp", "5"), "temperature"),
        (("-m", "5"), "model"),
        (("-s", "5"), "seed"),
        (("--repetition-penalty", "5"), "repeat_penalty"),
        (("-sys", "5"), "system"),
    ],
)
def test_flags_that_mean_the_same(words, name):
    assert settings_of("run", *words)[name] == "5"


def test_flags_of_servers_that_mean_the_same():
    given = settings_of("serve", "--parallel", "3", "-a", "x", "--served-model-name", "y")
    assert (given["slots"], given["alias"]) == ("3", ["x", "y"])


def test_a_prompt_flag_is_the_prompt(zinc, tiny_model):
    model = ("--model", tiny_model, "-n", 4)
    assert zinc("run", "-p", "hi", *model).out == zinc("run", "hi", *model).out
    assert "given twice" in zinc("run", "hi", "-p", "hi", *model).err


@pytest.mark.parametrize("flag", sorted(ADVICE))
def test_other_flags_are_answered_with_advice(zinc, flag):
    """Also those that begin with one of ours: -ngl is not -n with the value gl."""
    result = zinc("run", "hi", flag, "99")
    assert result.code == 2
    assert ADVICE[flag] in result.err


def test_all_foreign_flags_are_answered_at_once(zinc):
    """A pasted command line is mended in one go, and no flag swallows the advice about another."""
    result = zinc("run", "hi", "-ngl", 99, "-fa", "on", "--frob", 3, "--jinja", "--mlock")
    for flags in ("-ngl", "-fa, --mlock", "--jinja"):
        assert f"{flags}: {ADVICE[flags.partition(',')[0]]}" in result.err
    assert "unknown flag --frob: no command has it" in result.err
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_underscores_and_the_names_of_the_hub_are_understood():
    parser = build_parser(["run"])
    run = named_parser(parser, ["run"])[0]
    for given, own in (
        ("--max_tokens=3 --top_p 1", "--max-tokens=3 --top-p 1"),
        ("-hf a/b:Q4_0 hi", "hi --model hf.co/a/b:Q4_0"),
        ("--hf-repo=hf.co/a/b -hff m.gguf", "--model hf.co/a/b/m.gguf"),
        ("--no_such_flag 3", "--no_such_flag 3"),
        ("-- --top_p -hf", "-- --top_p -hf"),
        ("a_b --model x_y", "a_b --model x_y"),
    ):
        assert own_spelling(run, given.split()) == own.split()
    assert "--hf-file: write --model hf.co/" in refused(run, own_spelling(run, ["-hff", "m.gguf"]))


def refused(parser: argparse.ArgumentParser, words: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        refuse_foreign_flags(parser, words, build_parser)
    return str(error.value)


def test_help_knows_the_flags_of_other_programs(zinc):
    for word, flag in (("-ngl", "-ngl"), ("ngl", "-ngl"), ("jinja", "--jinja")):
        assert ADVICE[flag] in zinc("help", word).out


def test_advice_names_flags_and_commands_that_exist():
    root = build_parser()
    flags = {flag for parser in (root, *commands(root)) for flag in flags_of(parser)}
    texts = " ".join((*ADVICE.values(), *ADVISED_COMMANDS.values())).replace(",", " ").split()
    for word in texts:
        assert not word.startswith("--") or word in flags, word
    for words in (*SAME_COMMANDS.values(), *re.findall(r"zinc-rt ([\w-]+)", " ".join(texts))):
        word = words if isinstance(words, str) else words[0]
        assert word in COMMANDS or word in flags
    assert not {*SAME_COMMANDS, *ADVISED_COMMANDS} & {*COMMANDS}


@pytest.mark.parametrize(("words", "same"), SAME_COMMANDS.items())
def test_commands_that_mean_the_same(zinc, words, same):
    more = () if words == "version" else ("--help",)
    assert zinc(*words.split(), *more) == zinc(*same, *more)
    assert zinc(*words.split(), *more).code == 0


@pytest.mark.parametrize("flag", ["-v", "-V", "--version"])
def test_the_version(zinc, flag):
    assert zinc(flag).out.startswith("zinc-rt ")


class TestModelArgument:
    """A model may be named without ``--model``, as in ``ollama run`` and ``vllm serve``."""

    def test_before_the_prompt(self, zinc, tiny_model):
        words = ("-n", 4, "--seed", 5)
        answer = zinc("run", "hi", "--model", tiny_model, *words).out
        assert zinc("run", tiny_model, "hi", *words).out == answer
        assert zinc("run", tiny_model, *words, "hi").out == answer
        assert zinc("run", *words, tiny_model, "-p", "hi").out == answer
        assert zinc("run", tiny_model, *words, stdin=b"hi\n").out == answer

    def test_alone_on_a_terminal_it_begins_a_conversation(self, tiny_model):
        with terminal("run", tiny_model, "-n", 4) as shown:
            shown.wait_for(">")
            shown.type("hi\n")
            shown.wait_for("tok/s")

    def test_of_a_conversation(self, zinc, tiny_model):
        words = ("-n", 4, "--quiet")
        named = zinc("chat", "--model", tiny_model, *words, stdin=b"hi\n")
        assert zinc("chat", tiny_model, *words, stdin=b"hi\n") == named
        assert named.code == 0

    def test_a_name_of_another_library_is_no_prompt(self, zinc):
        result = zinc("run", "llama3.2:1b", stdin=b"hi\n")
        assert result.code == 2
        assert result.err.startswith("error: no file or catalog entry named 'llama3.2:1b'")

    def test_a_folder_and_a_page_of_the_hub_are_named(self, zinc, tmp_path):
        (tmp_path / "model.safetensors").touch()
        assert "is a folder; its model is not GGUF" in zinc("run", tmp_path, "hi").err
        assert names_model("https://huggingface.co/ORG/REPO")

    def test_a_model_needs_no_ending(self, zinc, tiny_model, tmp_path):
        """As ollama stores them, by digest."""
        blob = tmp_path / "sha256-ab"
        blob.symlink_to(tiny_model)
        assert zinc("run", blob, "hi", "-n", 2).out == zinc("run", tiny_model, "hi", "-n", 2).out

    def test_a_path_is_no_prompt(self, zinc, tmp_path):
        below = tmp_path / "org" / "repo" / "m.gguf"
        below.parent.mkdir(parents=True)
        below.touch()
        assert f"such as {below}" in zinc("run", tmp_path, "hi").err
        for path in ("./gone", "~/gone", "/no/such"):
            assert f"named {path!r}" in zinc("run", path, "hi").err

    def test_a_file_that_is_no_model_is_named(self, zinc, tmp_path):
        path = tmp_path / "text.gguf"
        path.write_text("not a model")
        assert f"{path}: byte offset 0: bad magic" in zinc("run", path, "hi").err
        assert f"{path}: byte offset 0: bad magic" in zinc("serve", path, "--port", 0).err


def test_aliases_are_unambiguous():
    aliases = [flag for setting in SETTINGS.values() for flag in setting.flags]
    assert len(aliases) == len(set(aliases))


@pytest.mark.parametrize(("address", "name"), [
    ("https://huggingface.co/org/repo-GGUF", "hf.co/org/repo-GGUF"),
    ("https://huggingface.co/org/repo-GGUF/tree/main", "hf.co/org/repo-GGUF"),
    ("https://hf.co/org/repo/blob/main/a/m.gguf", "hf.co/org/repo/a/m.gguf"),
    ("https://huggingface.co/org/repo/resolve/main/m.gguf?download=true", "hf.co/org/repo/m.gguf"),
    ("hf.co/org/repo:Q4_0", "hf.co/org/repo:Q4_0"),
    ("qwen3-0.6b", "qwen3-0.6b"),
    ("https://example.org/org/repo", "https://example.org/org/repo"),
])  # fmt: skip
def test_a_pasted_address_of_the_hub_is_a_name(address, name):
    assert pasted_name(address) == name


def test_addresses_that_mean_nothing_here_say_what_would(zinc):
    old = "https://huggingface.co/org/repo/blob/0123abc/m.gguf"
    assert "only main can be fetched" in zinc("run", "hi", "--model", old).err
    assert "hf.co/org/repo" in zinc("run", "hi", "--model", "org/repo").err
    assert "did you mean qwen3-0.6b" in zinc("run", "hi", "--model", "qwen3:0.6b").err


def test_a_prompt_that_is_the_name_of_a_model_has_a_note(zinc, tiny_model):
    prompts = {"smollm2-135m-instruct": True, "llama3:8b": True, "What is in a.gguf": False}
    for prompt, noted in prompts.items():
        result = zinc("run", prompt, "--model", tiny_model, "--max-tokens", 1)
        assert result.code == 0
        assert (f"'{prompt}' is the prompt; a model is named with --model" in result.err) == noted


def test_a_prompt_that_is_the_name_of_a_file_has_a_note(zinc, tiny_model, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    result = zinc("run", notes, "--model", tiny_model, "--max-tokens", 1)
    assert result.code == 0
    assert "is the prompt; the text of a file is read with -f" in result.err
    read = zinc("run", "-f", notes, "--model", tiny_model, "--max-tokens", 1)
    assert "with -f" not in read.err
    refused = zinc("run", notes, "hello")
    assert refused.code == 2
    assert f"{notes} is no model file; -f {notes} reads a prompt from it" in refused.err


def test_a_word_without_a_dash_is_no_flag(zinc, tiny_model):
    """Whatever letters the flags have, and as the value of a flag, too."""
    for letter in ("m", "n", "t", "c"):
        assert zinc("run", letter, "--model", tiny_model, "--max-tokens", 1).code == 0
        refused = zinc("serve", "gone.gguf", "--alias", letter, "--port", 0)
        assert "no file or catalog entry named 'gone.gguf'" in refused.err
