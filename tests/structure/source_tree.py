"""What the structure tests read: the project's files, their syntax trees and their imports."""

import ast
import gc
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.paths import ROOT

PRODUCT = ("contract", "reference", "accel", "harness")
SOURCE_SUFFIXES = {".py", ".c", ".cl", ".cpp", ".cu", ".h", ".k", ".css", ".js"}
PYTHON_API = ROOT / "harness" / "python"
TELLING = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Call),
)
EXCEPTIONS = Path(__file__).with_name("exceptions.txt")


@cache
def sources() -> tuple[Path, ...]:
    """Every text written in this project: Python, kernels and the page, not vendored code."""
    found = (path for top in (*PRODUCT, "tests") for path in (ROOT / top).rglob("*"))
    return tuple(
        sorted(
            path
            for path in found
            if path.suffix in SOURCE_SUFFIXES and not {"vendor", "__pycache__"} & set(path.parts)
        )
    )


@cache
def python_files() -> tuple[Path, ...]:
    """The Python files among ``sources``."""
    return tuple(path for path in sources() if path.suffix == ".py")


@cache
def trees() -> Mapping[Path, ast.Module]:
    """The syntax tree of every Python file. Looking for garbage among them takes longer than
    parsing, and there is none."""
    gc.disable()
    try:
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_files()}
    finally:
        gc.enable()


@cache
def telling_nodes(source: ast.AST) -> tuple[ast.AST, ...]:
    """What a tree imports, defines and calls: walking through all of it takes longest."""
    return tuple(node for node in ast.walk(source) if isinstance(node, TELLING))


def relative(path: Path) -> str:
    """The path from the project's top folder, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """The dotted name by which a file is imported."""
    base = PYTHON_API if path.is_relative_to(PYTHON_API) else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def product_modules() -> dict[str, ast.Module]:
    """The syntax tree of every product module by its dotted name."""
    return {
        module_name(path): source
        for path, source in trees().items()
        if path.relative_to(ROOT).parts[0] in PRODUCT
    }


def imported_modules(source: ast.AST, known: frozenset[str]) -> set[str]:
    """The ``known`` modules that a tree imports: in functions and for typing, too."""
    found = set()
    for node in telling_nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & known


def exceptions(rule: str) -> set[str]:
    """What the file of exceptions lists for one rule."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    rows = (line.split(maxsplit=2) for line in lines if line and not line.startswith("#"))
    return {subject for name, subject, _ in rows if name == rule}
