"""Which package may import which: contract <- reference, accel <- harness <- zinc_rt, and no way
around."""

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.paths import ROOT
from tests.structure.source_tree import relative, telling_nodes, trees

PROJECT = {"contract", "reference", "accel", "harness", "zinc_rt", "tests", "ci"}
MAY_IMPORT = {
    "contract": {"contract"}, "reference": {"contract", "reference"},
    "accel": {"contract", "accel"}, "harness": {"contract", "reference", "accel", "harness"},
    "zinc_rt": {"contract", "reference", "harness", "zinc_rt"},
}  # fmt: skip
PYTHON_API = ROOT / "harness" / "python" / "zinc_rt"
"""A package of its own, whatever folder it lies in: nobody else imports it."""
CONTRACT_LIBRARIES = {"numpy"}
DYNAMIC = {"import_module", "__import__"}


def imported(source: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import, literal dynamic ones included.

    A relative import stays inside the package and is reported as "."."""
    for node in telling_nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = node.args[0]
            if name in DYNAMIC and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value).partition(".")[0]


def violations(package: str, source: ast.Module) -> list[str]:
    """Every import that ``package`` may not have, as "line: name"."""
    allowed = MAY_IMPORT[package]
    found = []
    for line, name in imported(source):
        foreign = name in PROJECT and name not in allowed
        library = name not in PROJECT | set(sys.stdlib_module_names) | {"."}
        if foreign or (package == "contract" and library and name not in CONTRACT_LIBRARIES):
            found.append(f"{line}: {name}")
    return found


FILES = {
    package: [
        path
        for path in sorted((PYTHON_API if package == "zinc_rt" else ROOT / package).rglob("*.py"))
        if package == "zinc_rt" or not path.is_relative_to(PYTHON_API)
    ]
    for package in MAY_IMPORT
}


@pytest.mark.parametrize("package", FILES)
def test_imports_follow_the_rule(package):
    found = {relative(path): violations(package, trees()[path]) for path in FILES[package]}
    assert found
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("contract", "import numpy as np\nimport json\nfrom contract.spec import Dim", []),
        ("contract", "import scipy.linalg", ["1: scipy"]),
        ("contract", "from reference.ops import add", ["1: reference"]),
        ("reference", "import contract\nimport regex", []),
        ("reference", "def f():\n    from accel.opencl import tier", ["2: accel"]),
        ("reference", "import harness.cli", ["1: harness"]),
        ("accel", "import reference.ops as ops", ["1: reference"]),
        ("accel", "from importlib import import_module\nimport_module('reference.ops')",
         ["2: reference"]),
        ("accel", "__import__('harness')", ["1: harness"]),
        ("harness", "import reference, accel, contract", []),
        ("harness", "from tests.paths import ROOT", ["1: tests"]),
        ("harness", "from zinc_rt import LLM", ["1: zinc_rt"]),
        ("zinc_rt", "from zinc_rt.llm import LLM\nimport accel", ["2: accel"]),
    ],
)  # fmt: skip
def test_the_check_finds_what_it_should(package, source, found):
    """Negative control: made-up sources with and without forbidden imports."""
    assert violations(package, ast.parse(source)) == found
