"""Every command of README, docs and help is understood; those that end here are run."""

import argparse
import fcntl
import importlib
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
from functools import cache
from pathlib import Path

import pytest

from contract.errors import ConfigError
from harness.cli.foreign_flags import refuse_foreign_flags
from harness.cli.main import build_parser
from harness.cli.model_argument import take_model
from harness.cli.parser import Parser, commands, named_parser
from harness.cli.tools_command import TOOLS
from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS
from tests.walk.conftest import MODEL, Newcomer
from tests.walk.pages import HELP, page_commands, words_of

pytestmark = pytest.mark.walk
PLACEHOLDERS = re.compile(r"\.\.\.|<\w+>|\bWORD\b")
TOOL_MODULES = {f"harness.{name}": module for name, (module, _) in TOOLS.items()}
ALL = list(dict.fromkeys(page_commands()))
NEVER_ENDS = ("serve", "ps", "stop", "verify", "tenants", "bench", "goldens", "conformance")
"""Commands of a server, which have a walk of their own, and those that run for minutes."""
NEEDS = re.compile(r"hf\.co/|qwen3-0\.6b|--server|--ray|KERNEL\.k|--replay|simulated|REQUEST")
"""What a newcomer who is offline and has no card cannot run to the end."""
DEVICES = re.compile(r"--tier (?:cuda|vulkan|opencl|metal|t1|t2)|^(?:pm4-test|card-test)")
ONE_LINE = re.compile(r"(?:[^\n]*\n)*error: [^\n]+\n")


@cache
def root_parser() -> Parser:
    """That of all commands, which parsing does not change."""
    return build_parser()


def parser_of(words: tuple[str, ...]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of a command, and the words behind its name."""
    name = words[1] if words[0] == "zinc-rt" else words[2]
    module = TOOLS[name][0] if name in TOOLS else TOOL_MODULES.get(name)
    if module is not None:
        tool = importlib.import_module(module)
        if not hasattr(tool, "build_parser"):
            return argparse.ArgumentParser(), []
        return tool.build_parser(), list(words[2 if words[0] == "zinc-rt" else 3 :])
    return root_parser(), list(words[1:])


def understood(words: tuple[str, ...]) -> str | None:
    """Why a command line is not understood, or None."""
    if words[0] == "python" and words[2] not in TOOL_MODULES:
        return None if importlib.util.find_spec(words[2]) else f"no module {words[2]}"
    parser, rest = parser_of(words)
    try:
        command = named_parser(parser, rest)[0]
        refuse_foreign_flags(command, rest, root_parser)
        args, unknown = parser.parse_known_args(rest)
        unknown = take_model(command, args, unknown)
    except (ConfigError, SystemExit) as error:
        return str(error)
    return f"unknown {unknown}" if unknown else None


def test_there_are_commands():
    assert len(ALL) > 60
    assert {page for page, _ in ALL} >= {"README.md", "serving.md", "tools.md", "memory.md"}


def test_every_command_of_the_pages_is_understood():
    wrong = [
        (page, " ".join(words), problem)
        for page, words in ALL
        if not PLACEHOLDERS.search(" ".join(words)) and (problem := understood(words))
    ]
    # A sentence may mention a command or a flag by its name alone.
    mentions = re.compile(r"required|expected one argument|^[02]$")
    assert [one for one in wrong if not mentions.search(one[2])] == []


def test_a_command_that_is_not_understood_would_be_found():
    assert understood(("zinc-rt", "run", "hi", "--no-such-flag", "1"))
    assert understood(("python", "-m", "harness.synth", "--no-such-flag"))


def test_every_example_of_the_help_is_understood():
    root = root_parser()
    texts = [
        parser.epilog or "" for parser in (root, *commands(root)) if isinstance(parser, Parser)
    ]
    lines = [line for text in texts for line in HELP.findall(text)]
    assert len(lines) > 40
    assert [line for line in lines if understood(words_of(re.split(r" {2,}", line)[0]))] == []


def runnable() -> list[tuple[str, ...]]:
    """The commands that end by themselves on any machine, each once."""
    found = []
    for _, words in ALL:
        line = " ".join(words[1:])
        name = words[1] if words[0] == "zinc-rt" else ""
        if not name or name in NEVER_ENDS or name in TOOLS or NEEDS.search(line):
            continue
        if DEVICES.search(line) or PLACEHOLDERS.search(line) or name == "help":
            continue
        if name in ("asm", "logits") and len(words) == 2:
            continue
        if name == "run" and root_parser().parse_args(words[1:]).prompt is None:
            continue
        found.append(words)
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def settled(newcomer) -> Newcomer:
    """A newcomer with a model of their own, and with what the pages call FILE and
    ``requests.jsonl``."""
    newcomer.zinc("model", "use", f"./{MODEL}")
    body = {"prompt": "Hello", "max_tokens": 4}
    request = {"custom_id": "1", "url": "/v1/completions", "body": body}
    for name, text in (("FILE", "A text."), ("requests.jsonl", json.dumps(request))):
        newcomer.run("sh", "-c", f"cat > {name}", given=f"{text}\n")
    return newcomer


@pytest.mark.parametrize("words", runnable(), ids=" ".join)
def test_commands_of_the_pages_run(settled, words):
    more = ("--max-tokens", "8") if words[1] in ("run", "chat") else ()
    given = "Hello\n" if words[1] == "chat" else ""
    done = settled.run(*words, *more, given=given)
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.returncode == 0 or words[1] == "check", done.stderr


@pytest.mark.parametrize(
    "line",
    [
        *('zinc-rt run --tier cuda "Hello"', 'zinc-rt run --tier metal "Hello"'),
        *("zinc-rt pm4-test --tier t1", "zinc-rt model pull"),
        'zinc-rt run --model hf.co/unsloth/Qwen3-4B-GGUF:Q4_K_M "Hello"',
        'zinc-rt run --model nothing.gguf "Hello"',
        "zinc-rt goldens check",
    ],
)
def test_what_is_missing_is_said_in_one_line(settled, line):
    done = settled.run(*words_of(line))
    assert done.returncode in (1, 2)
    assert ONE_LINE.fullmatch(done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_steps(newcomer):
    """From nothing to an answer: what is missing, a model, a setting, a pipe."""
    assert "zinc-rt" in newcomer.zinc("--version")
    # Another command of the pages may have written one into this home before.
    (newcomer.home / ".config" / "zinc-rt" / "config.toml").unlink(missing_ok=True)
    written = newcomer.zinc("config", "init").strip()
    assert Path(written).is_relative_to(newcomer.home)
    newcomer.zinc("model", "use", f"./{MODEL}")
    assert newcomer.zinc("check").endswith("READY\n")
    answer = newcomer.zinc("run", "Why?", "-n", "8")
    assert newcomer.zinc("run", "-", "-n", "8", given="Why?\n") == answer
    for module in ("harness", "zinc_rt"):
        assert newcomer.run("python", "-m", module, "run", "Why?", "-n", "8").stdout == answer
        assert newcomer.run("python", "-m", module, "run", "-m", "none.gguf").returncode == 2
    assert len(newcomer.zinc("chat", "-n", "8", "--quiet", given="Why?\nAnd?\n").splitlines()) >= 2


def test_a_script_of_the_readme(settled):
    """Its Python example runs, with shorter answers."""
    text = (ROOT / "README.md").read_text("utf-8")
    start = text.index("    from zinc_rt import")
    block = text[start : text.index("\n\n", start)]
    script = "\n".join(line[4:] for line in block.splitlines()).replace(
        "max_tokens=32", "max_tokens=4"
    )
    done = settled.run("python", "-c", script, ZINC_RT_CONTEXT="512")
    assert done.returncode == 0, done.stderr
    assert done.stdout


SCRIPT = """
from zinc_rt import LLM, Output, SamplingParams, Score, ZincError

try:
    with LLM("tiny.gguf", tier="native", slots=2, context=256, progress=False) as llm:
        short = SamplingParams(max_tokens=4, stop=["stop"])
        outputs: list[Output] = llm.generate(["one", "two"], short)
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], short)
        streamed: str = "".join(piece.text for piece in llm.stream("one", short))
        scores: list[Score] = llm.score("one two")
        total: float = scores[0].total
        assert streamed == outputs[0].text, str(answer)
except ZincError as error:
    print(error)
"""


def test_a_users_script_is_typed(settled):
    """The installed package has types: mypy passes the script, and names what is wrong in one that
    says ``tire=``, or a tier that is none."""
    scripts = {
        "right": SCRIPT,
        "key": SCRIPT.replace("tier=", "tire="),
        "value": SCRIPT.replace('"native"', '"natiev"'),
    }
    for name, script in scripts.items():
        settled.run("sh", "-c", f"cat > {name}.py", given=script)
    words = ("python", "-m", "mypy", "--strict", "--cache-dir", "types")
    done = settled.run(*words, *(f"{name}.py" for name in scripts))
    wrong = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {line.partition(":")[0]: line for line in wrong}
    assert len(wrong) == len(found) == 2, done.stdout
    assert 'Unexpected keyword argument "tire"' in found["key.py"]
    assert 'Argument "tier" to "LLM" has incompatible type' in found["value.py"]
    assert settled.run("python", "-c", SCRIPT).stdout == ""


def test_what_users_of_other_programs_type(settled):
    """They name the model first, and have short commands for models."""
    answer = settled.zinc("run", "--model", MODEL, "Why?", "-n", "8")
    assert settled.zinc("run", MODEL, "Why?", "-n", "8") == answer
    assert settled.zinc("run", f"./{MODEL}", "-n", "8", given="Why?\n") == answer
    assert settled.zinc("ls") == settled.zinc("model", "list")
    # How much memory is free changes from one call to the next.
    shown, inspected = (settled.zinc(name, MODEL).splitlines() for name in ("show", "inspect"))
    assert shown[:5] == inspected[:5]
    assert settled.zinc("-v") == settled.zinc("version") == settled.zinc("--version")
    assert "did you mean smollm2-135m-instruct?" in settled.run("zinc-rt", "pull", "smollm2").stderr


def test_a_terminal_of_80_columns(settled):
    """No line of the help is cut or wrapped by the terminal."""
    for name in ("run", "serve", "model"):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = settled.start("zinc-rt", name, "--help", stdout=slave, stderr=slave)
        os.close(slave)
        shown = b""
        while select.select([master], [], [], PATIENCE_SECONDS)[0]:
            try:
                shown += os.read(master, 4096)
            except OSError:
                break
        os.close(master)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert max(map(len, shown.decode().split("\r\n"))) <= 80


def test_nothing_is_written_outside_the_home(settled):
    """A model is chosen, a configuration exists, and both are below the home."""
    listed = settled.zinc("model", "active").strip()
    assert Path(listed).is_relative_to(settled.home.resolve())
    done = subprocess.run(
        ["find", str(settled.home), "-name", "active"], capture_output=True, text=True
    )
    assert done.stdout.strip()
