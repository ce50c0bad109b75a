"""What a newcomer meets: piped text, outputs that fail, missing libraries, own settings."""

import argparse
import errno
import io
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from contract.errors import DoesNotFit
from harness import catalog
from harness.cli import servers_command
from harness.cli.config_command import example
from harness.serve.presence import Presence
from harness.settings import resolve
from harness.settings_table import SETTINGS
from tests.cli.conftest import command, environment, zinc_process
from tests.cli.terminal import terminal
from tests.full_disk import largest_file
from tests.patience import PROCESS_SECONDS


class TestPiped:
    """Text that is piped in is part of the prompt."""

    def test_it_comes_behind_the_argument(self, zinc, tiny_model):
        words = ("--model", tiny_model, "-n", 8)
        whole = zinc("run", "Summarise:\nfirst\nsecond", *words).out
        piped = zinc_process("run", "Summarise:", *words, stdin=b"first\nsecond\n")
        assert (piped.code, piped.out) == (0, whole)
        assert zinc("run", "Summarise:", *words).out != whole

    @pytest.mark.parametrize("dash", [("-f", "-"), ()])
    def test_a_dash_reads_all_of_it(self, zinc, tiny_model, dash):
        words = ("--model", tiny_model, "-n", 8)
        piped = zinc_process("run", *dash, *words, stdin=b"all of it\n")
        assert piped.out == zinc("run", "all of it", *words).out

    def test_no_text_and_no_pipe_change_nothing(self, zinc, tiny_model):
        words = ("run", "hello", "--model", str(tiny_model), "-n", "8")
        alone = zinc(*words).out
        assert zinc_process(*words, stdin=b"").out == alone
        with open(os.devnull, "rb") as nothing:
            done = subprocess.run(
                command(*words), stdin=nothing, capture_output=True, env=environment()
            )
        assert done.stdout.decode() == alone


class TestOutputs:
    """An output that fails ends the command with one line."""

    @pytest.fixture(params=["run", "help", "more than a buffer"])
    def words(self, request, tiny_model) -> list[str]:
        running = ["run", "hi", "--model", str(tiny_model), "-n", "4"]
        others = {"help": ["--help"], "more than a buffer": ["serve", "--help-all"]}
        return others.get(request.param, running)

    def test_a_full_device(self, words):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                command(*words), stdout=full, stderr=subprocess.PIPE, env=environment()
            )
        errors = [line for line in done.stderr.decode().splitlines() if line.startswith("error")]
        assert (done.returncode, len(errors)) == (1, 1)
        assert errors[0] == "error: standard output: cannot write: No space left on device"
        assert b"Exception ignored" not in done.stderr
        assert b"Traceback" not in done.stderr

    def test_a_closed_output(self, words):
        """No other file gets its number, and what is written is not lost in silence."""
        line = f"{shlex.join(command(*words))} >&-"
        done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, env=environment())
        assert done.returncode == 1
        assert b"error: standard output: cannot write: Bad file descriptor" in done.stderr
        assert b"Traceback" not in done.stderr

    def test_a_closed_error_output(self, zinc, words):
        line = f"{shlex.join(command(*words))} 2>&-"
        done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, env=environment())
        assert (done.stdout.decode(), done.returncode) == (zinc(*words).out, 0)

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_file_that_cannot_grow(self, tmp_path, words, unbuffered):
        """An output that is closed while it is written to is no error."""
        variables = {**environment(), "PYTHONUNBUFFERED": unbuffered}
        with open(tmp_path / "out", "wb") as out, largest_file(4):
            done = subprocess.run(
                command(*words), stdout=out, stderr=subprocess.PIPE, env=variables
            )
        assert done.returncode == 1
        assert b"error: standard output: cannot write: File too large\n" in done.stderr

    @pytest.mark.parametrize(
        ("number", "name", "says"),
        [
            (errno.ENOSPC, None, "No space left on device; "),
            (errno.ENOSPC, 5, "No space left on device; "),
            (errno.EIO, None, "Input/output error; "),
            (errno.EBADF, None, "Bad file descriptor; "),
            (errno.ENOSPC, "a.json", "a.json: cannot write: No space left on device\n"),
            (errno.EROFS, "a.json", "a.json: cannot write: Read-only file system\n"),
            (errno.EIO, "a.gguf", "a.gguf: Input/output error\n"),
            (errno.EBADF, "a.gguf", "a.gguf: Bad file descriptor\n"),
        ],
    )
    def test_what_is_not_known_is_not_blamed(self, zinc, tmp_path, monkeypatch, number, name, says):
        """An output that takes all is not what refused, whatever it is."""

        def refuse(words: list[str]) -> int:
            raise OSError(number, os.strerror(number), name)

        monkeypatch.setattr("harness.cli.main._run", refuse)
        for place in (tmp_path / "out", Path(os.devnull), None):
            with monkeypatch.context() as patch, ExitStack() as opened:
                if place is not None:
                    patch.setattr("sys.stdout", opened.enter_context(place.open("w")))
                result = zinc("check")
            debugged = "run again with --debug for a traceback\n"
            expected = f"error: {says}" + (debugged if says.endswith("; ") else "")
            assert (result.code, result.err) == (1, expected)

    def test_a_full_disk_names_the_file(self, zinc, tiny_model):
        result = zinc("graph", "--model", tiny_model, "--out", "/dev/full")
        assert result.code == 2
        assert "/dev/full: cannot write: No space left on device" in result.err


class TestConfiguration:
    """``zinc-rt config init`` writes a file that changes nothing until it is edited."""

    def test_it_is_found_and_shown_by_check(self, zinc, tmp_path):
        before = zinc("check").out
        result = zinc("config", "init")
        path = tmp_path / "config" / "zinc-rt" / "config.toml"
        assert (result.code, result.out) == (0, f"{path}\n")
        assert f"configuration: {path} is not there; `zinc-rt config init`" in before
        assert f"configuration: {path} is read" in zinc("check").out
        assert "exists" in zinc("config", "init").err

    def test_every_line_is_a_comment_and_valid_when_it_is_none(self, tmp_path):
        assert tomllib.loads(example()) == {}
        lines = [line.removeprefix("# ") for line in example().splitlines()]
        values = [line for line in lines if " = " in line and line.split()[0] in SETTINGS]
        assert [line.partition(" = ")[0] for line in values] == list(SETTINGS)
        path = tmp_path / "all.toml"
        path.write_text("\n".join(line for line in values if not line.endswith(' = ""')))
        assert tomllib.loads(path.read_text())
        text = [line for line in values if ' = ""' not in line]
        path.write_text("\n".join(text))
        settings = resolve(argparse.Namespace(config=str(path)), list(SETTINGS), {})
        assert len(text) > 20
        for name, value in settings.items():
            assert value == SETTINGS[name].default_value()

    def test_a_group_of_commands_names_them(self, zinc):
        assert "error: name a command: init, show; see" in zinc("config").err
        assert "name a command: add, list, usage, rotate, rm, key, check;" in zinc("tenants").err

    def test_show_names_the_source_of_every_value(self, zinc, tmp_path, monkeypatch):
        """A flag before the environment, that before the file, that before the default."""
        path = Path(zinc("config", "init").out.strip())
        path.write_text('max_tokens = 7\nseed = 5\nslots = 2\ndisk_cache = "kept"\n')
        monkeypatch.setenv("ZINC_RT_SEED", "6")
        monkeypatch.setenv("ZINC_RT_SLOTS", "3")
        flags = ("--slots", "4", "--unknown-fields", "reject", "--lora", "a=/b.gguf:0.5")
        shown = json.loads(zinc("config", "show", "--json", *flags).out)
        assert list(shown) == list(SETTINGS)
        for name, value, source in (
            ("slots", "4", "flag --slots"),
            ("unknown_fields", "reject", "flag --unknown-fields"),
            ("lora", "a=/b.gguf:0.5", "flag --lora"),
            ("seed", "6", "environment ZINC_RT_SEED"),
            ("max_tokens", "7", f"file {path}:max_tokens"),
            ("disk_cache", str(path.parent / "kept"), f"file {path}:disk_cache"),
            ("top_k", "40", "default"),
            ("device", "the tier's first device", "default"),
        ):
            assert shown[name] == {"value": value, "from": source}
        result = zinc("config", "show", "--max-tokens", "9", "seed", "ZINC_RT_TOP_K")
        assert f"the configuration file is {path}\n" in result.err
        assert [row.split() for row in result.out.splitlines()] == [
            ["SETTING", "FROM", "VALUE"],
            ["seed", "environment", "ZINC_RT_SEED", "6"],
            ["top_k", "default", "40"],
        ]
        assert "'sed'; the nearest known key is 'seed'" in zinc("config", "show", "sed").err


class TestModels:
    """Files of one's own, and a machine that is offline."""

    def test_a_file_can_be_the_model_of_all_commands(self, zinc, tiny_model, monkeypatch):
        monkeypatch.chdir(tiny_model.parent)
        assert zinc("model", "use", f"./{tiny_model.name}").out == f"using {tiny_model}\n"
        monkeypatch.chdir("/")
        assert zinc("run", "hi", "-n", 4).out == zinc("run", "hi", "-n", 4, "-m", tiny_model).out
        assert zinc("model", "active").out == f"{tiny_model}\n"
        assert json.loads(zinc("model", "active", "--json").out)["installed"]
        assert str(tiny_model) in zinc("model", "list").out
        assert str(tiny_model) in zinc("check").out
        assert zinc("model", "use", "qwen3-0.6b").code == 0
        assert str(tiny_model) not in zinc("model", "list").out

    def test_a_chosen_file_that_is_gone_is_named(self, zinc, tmp_path):
        path = tmp_path / "gone.gguf"
        path.write_bytes(b"GGUF")
        assert zinc("model", "use", path).code == 0
        path.unlink()
        assert f"{path}: the file of `zinc-rt model use` is gone" in zinc("run", "hi").err

    @pytest.mark.parametrize("name", ["smollm2-135m-instruct", "hf.co/a/b"])
    def test_offline_is_one_line(self, name, tmp_path):
        """Both the index and the hub answer nothing; no library prints its own attempts."""
        closed = "127.0.0.1:9"
        result = zinc_process(
            "model", "pull", name, "--quiet",
            PIP_INDEX_URL=f"https://{closed}/simple", HF_ENDPOINT=f"http://{closed}",
            PIP_CONFIG_FILE=os.devnull, XDG_CACHE_HOME=str(tmp_path), HTTPS_PROXY="", HTTP_PROXY="",
        )  # fmt: skip
        assert (result.code, result.out) == (2, "")
        assert result.err.count("\n") == 1
        assert "check the connection" in result.err


class TestStop:
    """On a terminal ``stop`` without a name asks first."""

    @pytest.fixture
    def server(self, monkeypatch) -> Iterator[subprocess.Popen[bytes]]:
        """A process that stands for a server."""
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        import psutil

        presence = Presence(
            pid=process.pid,
            started=psutil.Process(process.pid).create_time(),
            url="http://127.0.0.1:1",
            model="tiny",
            tier="cpu",
            slots=4,
            drain_seconds=0.0,
            running=3,
            waiting=0,
            draining=False,
        )
        monkeypatch.setattr("harness.serve.presence.present", lambda: [presence])
        monkeypatch.setattr(
            servers_command, "_wait", lambda server, seconds: process.wait(PROCESS_SECONDS)
        )
        yield process
        process.kill()
        process.wait()

    @pytest.mark.parametrize(
        ("typed", "words", "ends"),
        [("n\n", [], False), ("\n", [], False), ("y\n", [], True), ("", ["--yes"], True),
         ("", ["1"], True)],
    )  # fmt: skip
    def test_it_asks(self, zinc, server, monkeypatch, typed, words, ends):
        keyboard = io.StringIO(typed)
        monkeypatch.setattr(keyboard, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", keyboard)
        result = zinc("stop", *words)
        asked = "stop http://127.0.0.1:1 (tiny, 3 running and 0 waiting requests)? [y/N]"
        assert (asked in result.err) == (not words)
        assert result.code == (0 if ends else 1)
        assert (server.poll() is not None) == ends


def test_quiet_prints_the_answer_alone(zinc, tiny_model):
    words = ("run", "hi", "--model", tiny_model, "-n", 4)
    loud, quiet = zinc(*words), zinc(*words, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, loud.out, "")
    assert loud.err != ""
    assert "no/such" in zinc("run", "hi", "-q", "--model", "no/such.gguf").err


def test_card_test_without_a_card_writes_nothing(zinc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.best_tier.card_makers", frozenset)
    monkeypatch.setattr("harness.best_tier.lists_cards", lambda: True)
    before = set(tmp_path.iterdir())
    result = zinc("card-test", "--device", "no such card")
    assert result.code == 1
    assert "nothing is written" in result.out
    assert set(tmp_path.iterdir()) == before


def test_the_rate_of_a_prompt_counts_what_was_computed(zinc, tiny_model):
    """The second turn of a conversation finds the first one in the cache."""
    lines = b"a first turn of some length, longer than a page of tokens\nand then?\n"
    words = ("chat", "--model", tiny_model, "-n", 4)
    first, second = zinc(*words, stdin=lines).err.splitlines()
    assert "cached" not in first
    prompt, cached = second.partition(" cached)")[0].removeprefix("[").split(" prompt tokens (")
    assert 0 < int(cached) < int(prompt)


def test_sizes_are_decimal_and_say_whose_limit_is_meant(zinc, tiny_model):
    words = ("run", "hi", "--model", tiny_model, "--context", 1024, "--memory-budget")
    error = zinc(*words, "1MB").err
    assert "may use 1 MB" in error
    assert "--memory-budget" in error
    assert "bytes" not in str(DoesNotFit("a", 2_000_000, 1_000_000, "b"))
    kind = SETTINGS["memory_budget"].kind
    assert [kind.parse(text) for text in ("6G", "6GB", "6 GB", "6GiB", "800M", "1048576")] == [
        6 * 10**9, 6 * 10**9, 6 * 10**9, 6 << 30, 800 * 10**6, 1 << 20,
    ]  # fmt: skip


def test_a_terminal_that_can_show_nothing_but_text(tiny_model):
    """The terminal has TERM=dumb: no bar, no colour, no control characters."""
    with terminal("run", "hi", "--model", tiny_model, "-n", 4) as shown:
        shown.wait_for("tok/s")
        shown.wait_for("]")
    assert "\x1b[" not in shown.seen
    assert catalog.DEFAULT_ID not in shown.seen
