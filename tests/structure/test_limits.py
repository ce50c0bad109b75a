"""Sizes that keep the project readable: of files, functions, the README and the docs."""

import ast
from pathlib import Path

from tests.paths import ROOT
from tests.structure.source_tree import exceptions, relative, sources, telling_nodes, trees

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_README_LINES = 120
MAX_DOCS_LINES = 2_600
MAX_DOCS_FILES = 16


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_functions(path: Path, source: ast.Module) -> set[str]:
    """Every function of more than the most lines, as "file:name"."""
    return {
        f"{relative(path)}:{node.name}"
        for node in telling_nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    }


def test_no_file_is_too_long():
    long = {relative(path) for path in sources() if line_count(path) > MAX_FILE_LINES}
    assert long == exceptions("file")


def test_no_function_is_too_long():
    long = {name for path, source in trees().items() for name in long_functions(path, source)}
    assert long == exceptions("function")


def test_the_readme_is_short():
    long = {"README.md"} if line_count(ROOT / "README.md") > MAX_README_LINES else set()
    assert long == exceptions("readme")


def test_the_docs_are_few_and_short():
    """Dated measurements in docs/log do not count: nobody has to read them."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    lines = sum(map(line_count, pages))
    long = {"docs"} if lines > MAX_DOCS_LINES or len(pages) > MAX_DOCS_FILES else set()
    assert long == exceptions("docs")


def test_a_long_function_is_found():
    """Negative control: a made-up function of one line more than the most."""
    source = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    assert long_functions(ROOT / "made_up.py", ast.parse(source)) == {"made_up.py:f"}
