"""The command that writes and verifies conformance packages."""

import hashlib
from functools import partial

import pytest

from harness.cli.main import main as zinc_rt
from harness.conformance.__main__ import main
from harness.tiers import open_tier
from tests.harness.test_conformance import ADD, SAMPLE, WrongAdd
from tests.needs import need_device
from tests.tables import table


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl"])
def test_command_runs_a_list_and_verifies_the_package(tmp_path, capsys, tier):
    need_device(partial(open_tier, tier)).close()
    requested, out = tmp_path / "list.txt", tmp_path / "p.tar.gz"
    requested.write_text("\n".join(SAMPLE[:4]) + "\n")
    words = ["--tier", tier, "--must-pass", str(requested), "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert hashlib.sha256(out.read_bytes()).hexdigest() in shown
    assert "no submission" in shown
    assert zinc_rt(["conformance", "--verify", str(out), "--must-pass", str(requested)]) == 0
    assert capsys.readouterr().out.startswith(f"CONFORMANT: {tier}")
    assert main(["--verify", str(out)]) == 1
    assert capsys.readouterr().out.startswith(f"NOT CONFORMANT: {tier}")


def test_a_failing_run_exits_with_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("harness.conformance.__main__.open_tier", lambda name, options: WrongAdd())
    requested = tmp_path / "list.txt"
    requested.write_text(ADD[0])
    words = ["--tier", "cpu", "--must-pass", str(requested), "--out", str(tmp_path / "p.tar.gz")]
    assert main(words) == 1
    assert f"FAIL {ADD[0]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"), table(__file__, "test_conformance_command")["command_refuses_in_one_line"]
)
def test_command_refuses_in_one_line(tmp_path, capsys, words, problem):
    files = {"list": "parity/none\n", "twice": "tier/opcodes\ntier/opcodes\n", "empty": "\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: tmp_path / name for name in files}
    assert main([word.format(folder=tmp_path, **places) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert problem in line
    assert not list(tmp_path.glob("*.tar.gz"))
