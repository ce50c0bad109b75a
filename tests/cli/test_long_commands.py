"""Each command that may work for long says meanwhile how far it is."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from harness import progress
from harness.bench.machine import stream_bandwidth
from harness.cli.main import COMMANDS
from harness.cli.tools_command import TOOLS

pytestmark = pytest.mark.usefixtures("cpu_is_quick")
TEXT = "the quick brown fox jumps over the lazy dog " * 3
LINE = {
    "custom_id": "1", "method": "POST", "url": "/v1/completions",
    "body": {"prompt": "a", "max_tokens": 2},
}  # fmt: skip

SAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "run": (("--raw", TEXT, "--chunk", "16", "--max-tokens", "1"), "reading the prompt: "),
    "run-batch": (("-i", "in.jsonl", "-o", "out.jsonl"), "answering: "),
    "verify": (("receipt.json",), "computing it again: "),
    "logits": (("--prompt", TEXT, "--chunk", "16"), "reading the prompt: "),
    "score": (("--prompt", TEXT, "--chunk", "16"), "reading the prompt: "),
    "export-plan": (("out.plan",), "writing: "),
    "synth": (("--arch", "qwen3", "--out", "new.gguf"), "writing random weights: "),
    "validate": (("--tokens", "1,2"), "definitions and tiers: "),
    "replay": (("run.trace",), "replaying: "),
    "sched-test": (("--schedules", "2", "--jobs", "1"), "simulating: "),
    "mem-test": (("--schedules", "2", "--jobs", "1"), "simulating: "),
}
"""Arguments for a tiny model, and how a line of progress begins that is not of its loading."""
BENCHES: dict[tuple[str, ...], str] = {
    (): "repetition 1 of 1",
    ("--drafts",): "cpu, 4 at once: ",
    ("--rates", "4", "--sequences", "2"): "cpu: 2 sequences, 2 of 2",
}
"""Ways of ``bench``, and the beginning of a line of the last part."""
ELSEWHERE = {"goldens", "conformance", "card-test", "model", "check", "bench", "chat", "serve"}
"""Tested where they are: checks and tests of cards print each result when it is there."""
SHORT = {
    *("receipts", "ps", "stop", "tenants", "inspect", "graph", "tokenize", "devices", "config"),
    *("asm", "pm4-test"),
}
"""Read small files or headers, or test packets one by one."""
SIZED = ("synth", "sched-test", "mem-test", "replay")
"""Commands without ``--model`` that is needed."""


@pytest.fixture
def folder(zinc, tiny_model_path, tmp_path, monkeypatch) -> Path:
    """A folder with the files of all commands, where they run."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "in.jsonl").write_text(json.dumps(LINE))
    made = ("--receipt", "receipt.json", "--trace", "run.trace", "--max-tokens", "2")
    recorded = zinc("run", "--raw", "a", *made, "--model", tiny_model_path, "--tier", "cpu")
    assert recorded.code == 0, recorded.err
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    return tmp_path


def test_every_command_is_judged():
    assert SAYS.keys() | ELSEWHERE | SHORT == COMMANDS.keys() | TOOLS.keys()


@pytest.mark.parametrize("command", SAYS)
def test_a_command_says_how_far_it_is(zinc, tiny_model_path, folder, command):
    words, said = SAYS[command]
    model = () if command in SIZED else ("--model", tiny_model_path)
    done = zinc(command, *words, *model)
    assert done.code == 0, done.err
    assert any(line.startswith(said) for line in done.err.splitlines()), done.err
    assert said not in done.out


@pytest.mark.parametrize("words", BENCHES, ids=" ".join)
def test_a_benchmark_says_how_far_it_is(zinc, tiny_model_path, folder, monkeypatch, words):
    # The arrays of usual size would be most of what a process of tests has.
    short = partial(stream_bandwidth, nbytes=1 << 22)
    monkeypatch.setattr("harness.bench.measure.stream_bandwidth", short)
    sizes = ("--prompt-tokens", "20", "--decode-tokens", "2", "--repeat", "1")
    done = zinc("bench", *words, *sizes, "--model", tiny_model_path, "--tiers", "cpu")
    assert done.code == 0, done.err
    assert any(line.startswith(BENCHES[words]) for line in done.err.splitlines()), done.err


def test_a_check_prints_each_finding_when_it_is_there(zinc, folder, monkeypatch, capsys):
    from harness.cli import findings

    shown: list[str] = []
    found: Callable[..., findings.Finding] = findings.numpy_finding

    def looked() -> findings.Finding:
        shown.append(capsys.readouterr().out)
        return found()

    monkeypatch.setattr(findings, "numpy_finding", looked)
    zinc("check", "--model", "missing.gguf")
    assert shown[0].startswith("ok     python: ")
