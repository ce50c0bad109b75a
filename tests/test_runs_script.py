"""``ci/runs.sh``: which tests run beside which, what is said of them, and how all of them end."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS, wait_until

PYTHON = """#!/bin/sh
case "$*" in
    *virtual_memory*) echo {beside} ;;
    *cpu_count*)
        while [ -e hold_count ]; do sleep 0.02; done
        echo 7 ;;
    *)
        trap 'echo "ended: $*" >>log; exit 143' TERM
        echo "begins: $*" >>log
        while [ -e hold ]; do sleep 0.02; done
        sleep 0.1
        echo "ends: $*" >>log
        echo "said: $*"
        case "$*" in *{failing}*) exit 3 ;; esac ;;
esac
"""
"""Says how much memory and how many cores there are, and notes what runs."""
SCRIPT = """set -eu
python=./python profile=all selection=some
. ./runs.sh
trap 'kill $running; exit 130' INT TERM
run_all "one two" three
"""
PARTS = ["tests/one tests/two", "tests/three"]
OTHERS = "tests --ignore=tests/one --ignore=tests/two --ignore=tests/three"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the script in a folder of its own, with a Python that only notes what it runs."""
    shutil.copy(ROOT / "ci" / "runs.sh", tmp_path)

    def start(beside: bool, failing: str = "nothing") -> subprocess.Popen[str]:
        python = tmp_path / "python"
        python.write_text(PYTHON.format(beside=int(beside), failing=failing))
        python.chmod(0o755)
        return subprocess.Popen(
            ["sh", "-c", SCRIPT], cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def noted(folder: Path) -> list[tuple[str, str]]:
    """What happened and to which folders of tests, in this order."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    pairs = [line.partition(": ") for line in lines]
    return [(what, words.partition("-m some ")[2]) for what, _, words in pairs]


@pytest.mark.parametrize("beside", [True, False])
def test_each_folder_is_tested_once(start: Start, tmp_path: Path, beside: bool) -> None:
    """One part after the other; the rest beside them where memory has room, behind them if not.
    What is said of the parts is never mixed with the rest."""
    ended = start(beside)
    said = ended.communicate(timeout=PATIENCE_SECONDS)[0]
    assert ended.returncode == 0, said
    happened = noted(tmp_path)
    parts = [one for one in happened if one[1] in PARTS]
    assert parts == [(what, part) for part in PARTS for what in ("begins", "ends")]
    rest = [one for one in happened if one[1] not in PARTS]
    assert rest == [("begins", OTHERS), ("ends", OTHERS)]
    assert (happened.index(rest[0]) < happened.index(parts[-1])) is beside
    assert "-n 7" in said.splitlines()[0 if beside else -1]
    assert [line.partition("-m some ")[2] for line in said.splitlines()] == (
        [OTHERS, *PARTS] if beside else [*PARTS, OTHERS]
    )


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("failing", ["tests/two", "tests/three", "ignore"])
def test_a_failure_anywhere_is_one_of_the_whole(
    start: Start, tmp_path: Path, beside: bool, failing: str
) -> None:
    """The others run all the same, and what is said last is not that they passed."""
    ended = start(beside, failing)
    said = ended.communicate(timeout=PATIENCE_SECONDS)[0]
    assert ended.returncode == 3, said
    assert "failed" in said.splitlines()[-1]
    assert sum(what == "ends" for what, _ in noted(tmp_path)) == len(PARTS) + 1


@pytest.mark.parametrize("beside", [True, False])
def test_who_ends_the_script_ends_its_tests(start: Start, tmp_path: Path, beside: bool) -> None:
    (tmp_path / "hold").touch()
    running = start(beside)
    wait_until(lambda: len(noted(tmp_path)) == 1 + beside)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 130
    assert [what for what, _ in noted(tmp_path)][1 + beside :] == ["ended"] * (1 + beside)


def test_who_ends_the_script_before_the_rest_begins_ends_the_parts(
    start: Start, tmp_path: Path
) -> None:
    for name in ("hold", "hold_count"):
        (tmp_path / name).touch()
    running = start(True)
    wait_until(lambda: len(noted(tmp_path)) == 1)
    running.send_signal(signal.SIGTERM)
    (tmp_path / "hold_count").unlink()
    running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 130
    assert [what for what, _ in noted(tmp_path)] == ["begins", "ended"]
