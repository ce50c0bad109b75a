"""A tiny model with random weights, damaged copies of it, and ways to run the command line."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic
from tests.changed_models import Change, write_changed
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

HELD_AFTER = 5
SERVER_LOGS = ("zinc_rt.serve", "waitress.queue")
"""Loggers whose levels a server sets: tests that follow must not write its log."""


@dataclass(frozen=True)
class Result:
    """What one run printed, and its exit code."""

    code: int
    out: str
    err: str


Zinc = Callable[..., Result]
"""A way to run a command line."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_synthetic(path, SynthSpec(quant="q8_0", seed=3))
    return path


@pytest.fixture
def variant(tiny_model, tmp_path) -> Callable[[Change], Path]:
    """Writes a copy of the tiny model after ``change(metadata, tensors)``."""
    return partial(write_changed, tiny_model, tmp_path / "variant.gguf")


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path, kernel_cache, monkeypatch) -> None:
    """No setting, cache or configuration file of the machine reaches a test.

    Kernels are built once for all tests: building takes longer than everything else here."""
    (tmp_path / "cache" / "zinc-rt").mkdir(parents=True)
    for tier in ("native", "opencl", "vulkan", "cuda"):
        (tmp_path / "cache" / "zinc-rt" / tier).symlink_to(kernel_cache)
    for name in list(os.environ):
        if name.startswith("ZINC_RT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ZINC_RT_TIER", "cpu")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def zinc(capsys, monkeypatch) -> Iterator[Zinc]:
    """Runs a command line in this process, with ``stdin`` piped in, if it is given."""
    levels = {name: logging.getLogger(name).level for name in SERVER_LOGS}

    def run(*words: object, stdin: bytes | None = None) -> Result:
        with ExitStack() as cleanup:
            if stdin is not None:
                reading, writing = os.pipe()
                piped = cleanup.enter_context(open(reading, encoding="utf-8"))
                with open(writing, "wb") as pipe:
                    pipe.write(stdin)
                cleanup.enter_context(monkeypatch.context()).setattr("sys.stdin", piped)
            code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def command(*words: object, hold: Path | None = None) -> list[str]:
    """The command line of a new process, whose engine makes HELD_AFTER steps before the file
    ``hold`` is gone."""
    program = ["harness"] if hold is None else ["tests.held_steps", str(hold), str(HELD_AFTER)]
    return [sys.executable, "-m", *program, *(str(word) for word in words)]


SOURCES = f"{ROOT}{os.pathsep}{ROOT / 'harness' / 'python'}"
"""The PYTHONPATH of programs that import ``zinc_rt``."""


def environment(**changes: str) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **changes}


def zinc_process(*words: object, stdin: bytes = b"", **changes: str) -> Result:
    """Runs a command line in a new process, with ``stdin`` piped in."""
    return _process(command(*words), stdin, changes)


def script_process(script: str, *words: object, **changes: str) -> Result:
    """Runs a Python program in a new process."""
    return _process([sys.executable, "-c", script, *map(str, words)], b"", changes)


def _process(words: list[str], stdin: bytes, changes: Mapping[str, str]) -> Result:
    done = subprocess.run(
        words, input=stdin, capture_output=True, env=environment(**changes), timeout=PROCESS_SECONDS
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())
