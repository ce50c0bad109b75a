"""Every example of the Python API and of its page runs."""

import doctest
import importlib
import pkgutil
import shutil

import pytest

import zinc_rt
from tests.paths import ROOT

MODULES = [
    importlib.import_module(f"zinc_rt.{found.name}")
    for found in pkgutil.iter_modules(zinc_rt.__path__)
]
PAGE = ROOT / "docs" / "python.md"


@pytest.fixture(autouse=True)
def beside_a_model(tiny_model_path, tmp_path, monkeypatch) -> None:
    """``model.gguf`` in the current folder, and nothing of the user's."""
    shutil.copy(tiny_model_path, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.mark.parametrize("module", [zinc_rt, *MODULES], ids=lambda module: module.__name__)
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_the_page():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.failed == 0
    assert results.attempted > 10


def test_what_a_user_calls_has_an_example():
    finder = doctest.DocTestFinder(exclude_empty=True)
    shown = {
        test.name for module in (zinc_rt, *MODULES) for test in finder.find(module) if test.examples
    }
    methods = ("generate", "chat", "stream", "logits")
    assert {f"zinc_rt.llm.LLM.{name}" for name in methods} <= shown
    assert {"zinc_rt", "zinc_rt.llm.LLM", "zinc_rt.server.serve"} <= shown


def test_a_wrong_example_fails(tmp_path):
    """Negative control."""
    page = tmp_path / "wrong.md"
    page.write_text(">>> 1 + 1\n3\n")
    assert doctest.testfile(str(page), module_relative=False, report=False).failed == 1
