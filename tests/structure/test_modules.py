"""How modules may depend on each other: in no circle, and never on a simulator of a device."""

import ast
from collections.abc import Mapping

from tests.paths import ROOT
from tests.structure.source_tree import (
    exceptions,
    imported_modules,
    module_name,
    product_modules,
    telling_nodes,
    trees,
)

TESTS = ROOT / "tests"

SIMULATOR_USERS = {"sim", "tools"}
"""Packages whose modules may import a simulator: it itself, and tools for developers."""


def reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Every module that ``start`` imports, itself or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def circles(modules: Mapping[str, ast.Module]) -> set[str]:
    """The modules of each import circle, sorted and joined by "+"."""
    known = frozenset(modules)
    imports = {name: imported_modules(tree, known) - {name} for name, tree in modules.items()}
    reached = {name: reachable(name, imports) for name in modules}
    return {
        "+".join(sorted(other for other in reached[name] if name in reached[other]))
        for name in modules
        if name in reached[name]
    }


def is_simulator(module: str) -> bool:
    parts = module.split(".")
    return "sim" in parts or parts[-1].startswith("fake_")


def simulator_imports(modules: Mapping[str, ast.Module]) -> set[str]:
    """Every product module that imports a simulator, as "module:simulator"."""
    known = frozenset(modules)
    return {
        f"{name}:{other}"
        for name, source in modules.items()
        if not is_simulator(name) and not SIMULATOR_USERS & set(name.split("."))
        for other in imported_modules(source, known)
        if is_simulator(other)
    }


def test_no_modules_import_each_other_in_a_circle():
    assert circles(product_modules()) == exceptions("circle")


def test_no_product_module_imports_a_simulator():
    assert simulator_imports(product_modules()) == exceptions("simulator")


def test_no_test_imports_setuptools():
    """It replaces modules that others have loaded: a test that needs it starts a process."""
    tests = {module_name(path): one for path, one in trees().items() if path.is_relative_to(TESTS)}
    known = frozenset(("setuptools", "setuptools.command.build_py", "accel.native.wheel_backend"))
    assert {name for name, source in tests.items() if imported_modules(source, known)} == set()
    assert imported_modules(ast.parse("from setuptools import Distribution"), known)


def defined_names(module: ast.Module) -> set[str]:
    """The names that a module has once it is imported: those its functions make are left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = [*module.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def missing_names(modules: Mapping[str, ast.Module]) -> set[str]:
    """Every name that is imported from a module which has none such, as "module:from.name"."""
    names = {name: defined_names(source) for name, source in modules.items()}
    return {
        f"{name}:{node.module}.{alias.name}"
        for name, source in modules.items()
        for node in telling_nodes(source)
        if isinstance(node, ast.ImportFrom) and node.module in names
        for alias in node.names
        if alias.name not in names[node.module] | {"*"}
        and f"{node.module}.{alias.name}" not in names
        and "__getattr__" not in names[node.module]
    }


def test_every_imported_name_is_there():
    """The type checker reads the product alone; a test that cannot be imported ends the suite."""
    assert missing_names({module_name(path): one for path, one in trees().items()}) == set()


def test_what_is_forbidden_is_found():
    """Negative control: a circle through a function's import, a product that needs a fake, and a
    name that is not there."""
    texts = {
        "accel.a": "def f():\n    from accel import b",
        "accel.b": "from accel.a import f\nfrom accel.sim.chip import run",
        "accel.sim.chip": "import accel.sim.parts",
        "accel.sim.parts": "",
    }
    modules = {name: ast.parse(text) for name, text in texts.items()}
    assert circles(modules) == {"accel.a+accel.b"}
    assert simulator_imports(modules) == {"accel.b:accel.sim.chip"}
    assert missing_names(modules) == {"accel.b:accel.sim.chip.run"}
