"""Commands of whoever has a card, on a machine with a simulated one."""

import tarfile

import pytest

from harness import best_tier
from harness.cli.main import main
from harness.validate.__main__ import main as validate


@pytest.mark.long
def test_validate_compares_every_op(present, tiny_model_path, capsys):
    """Of a prefill and of a single token, with the definitions."""
    argv = ["--model", str(tiny_model_path), "--tokens", "1,2,3", "--decode", "1"]
    assert validate([*argv, "--tiers", "intel"]) == 0
    assert "PASS: intel agrees" in capsys.readouterr().out


def test_card_test_writes_an_archive(present, tmp_path, capsys):
    """With what the driver lists and the conformance package."""
    cases, out = tmp_path / "list.txt", tmp_path / "card.tar.gz"
    cases.write_text("tier/opcodes\nparity/barrier\n")
    argv = ["card-test", "--tier", "intel", "--must-pass", str(cases), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_tier, "card_makers", lambda: frozenset({best_tier.INTEL}))
        assert main(argv) == 0
    with tarfile.open(out) as archive:
        names = {member.name.removeprefix("zinc-rt-card/") for member in archive}
        text = archive.extractfile("zinc-rt-card/report.txt")
        assert text is not None
        assert "all that ran passed" in text.read().decode()
    assert names == {"report.txt", "intel/conformance.tar.gz"}


def test_card_test_without_a_card(tmp_path, capsys):
    """It says what is missing, and writes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_tier, "card_makers", frozenset)
        assert main(["card-test", "--tier", "intel", "--out", str(tmp_path / "card.tar.gz")]) == 1
    assert "no Intel card: nothing is written" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
