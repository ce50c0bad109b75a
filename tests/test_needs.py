"""A proof goes missing only where the machine cannot hold it, and never under CI."""

import ast
from pathlib import Path

import pytest

from tests import needs
from tests.paths import ROOT

ABSENT = Path("absent.gguf")
SKIPPING = {"skip", "importorskip", "skipif", "skipTest", "SkipTest"}
WANTS = {
    "file": lambda: needs.need_file(ABSENT),
    "module": lambda: needs.need_module("absent_module", "absent"),
    "installed": lambda: needs.need_installed("absent_module", "absent"),
    "other": lambda: needs.missing("absent", "bring it"),
}


@pytest.mark.parametrize("want", WANTS)
def test_missing_data_skips_with_a_remedy(monkeypatch, want):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"absent.*; .+"):
        WANTS[want]()


@pytest.mark.parametrize("want", WANTS)
def test_missing_data_fails_under_ci(monkeypatch, want):
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"absent.*; .+CI is set"):
        WANTS[want]()


@pytest.mark.parametrize("ci", ["", "1"])
def test_what_the_machine_cannot_have_skips(monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match="this machine has no second sun"):
        needs.machine_lacks("second sun")


def test_what_is_there_is_given(monkeypatch):
    monkeypatch.setenv("CI", "1")
    assert needs.need_file(Path(__file__)) == Path(__file__)
    assert needs.need_module("ast", "test") is ast
    needs.need_installed("ast", "test")


def test_nothing_else_skips():
    """Every skip of the tests goes through the functions above."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path in (Path(needs.__file__), Path(__file__)):
            continue
        text = path.read_text(encoding="utf-8")
        # Few texts have these words anywhere: parsing all of them takes long.
        tree = ast.parse(text if any(word in text for word in SKIPPING) else "")
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)]
        lines = [
            node.lineno
            for node in named
            if (node.attr if isinstance(node, ast.Attribute) else node.id) in SKIPPING
        ]
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}
