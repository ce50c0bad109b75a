"""One host for requests: its clients have no loader, engine or maker of text of their own."""

import ast
from collections.abc import Mapping

import pytest

from harness.host.submissions import Submits
from tests.structure.source_tree import imported_modules, product_modules, telling_nodes

HOST = "harness.host."
CLIENTS = ("harness.serve", "harness.cli", "zinc_rt")
OWNERS = {
    "ModelRunner": {"harness.host.open", "harness.host.drafting"},
    "load_runner": {"harness.host.open"}, "load_drafter": {"harness.host.open"},
    "Engine": {"harness.host.open"}, "Models": {"harness.host.engine_thread"},
    "TextStream": {"harness.host.answer_text"},
}  # fmt: skip
"""What opens a model, runs its requests or makes text, and the modules of the host that call it."""
REPLICAS = "harness.serve.replicas"
WITH_A_THREAD = {"key"}
"""Attributes of drivers that are only read where a server has a thread or a process of engines."""


def callers(modules: Mapping[str, ast.Module], called: str) -> set[str]:
    """The modules of the host and of its clients that call a function or class by its name."""
    return {
        name
        for name, source in modules.items()
        if name.startswith((HOST, *CLIENTS))
        for node in telling_nodes(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and called == (node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
    }


def client_imports(modules: Mapping[str, ast.Module]) -> set[str]:
    """Every import of a client by the host, as "module:client"."""
    known = frozenset(modules)
    return {
        f"{name}:{other}"
        for name, source in modules.items()
        if name.startswith(HOST)
        for other in imported_modules(source, known)
        if other.startswith(CLIENTS)
    }


def asked_of_drivers(modules: Mapping[str, ast.Module]) -> set[str]:
    """The attributes of drivers that a server reads."""
    return {
        node.attr
        for name, source in modules.items()
        if name.startswith("harness.serve") and not name.startswith(REPLICAS)
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", getattr(node.value, "attr", "")) == "driver"
    }


def driver_of_replicas(modules: Mapping[str, ast.Module]) -> set[str]:
    """The attributes that a driver of replicas has."""
    (defined,) = (
        node
        for node in modules[f"{REPLICAS}.driver"].body
        if isinstance(node, ast.ClassDef) and node.name == "ReplicatedDriver"
    )
    fields = {ast.unparse(node.target) for node in defined.body if isinstance(node, ast.AnnAssign)}
    methods = {node.name for node in defined.body if isinstance(node, ast.FunctionDef)}
    return fields | methods | set(dir(Submits))


def test_a_driver_of_replicas_has_what_a_server_asks_of_drivers():
    """Nothing else tells: it is taken for a ``SharedDriver`` by a cast, and few have Ray."""
    asked = asked_of_drivers(product_modules())
    assert {"failure", "silence", "statistics"} < asked
    assert asked - driver_of_replicas(product_modules()) == WITH_A_THREAD


@pytest.mark.parametrize("called", OWNERS)
def test_only_the_host_opens_models_and_makes_text(called):
    assert callers(product_modules(), called) == OWNERS[called]


def test_the_host_imports_no_client():
    assert not client_imports(product_modules())


def test_a_second_loader_and_a_host_that_imports_a_client_are_found():
    """Negative control."""
    modules = {
        "harness.host.open": ast.parse("import harness.serve.app\nEngine(ModelRunner())"),
        "harness.serve.app": ast.parse("def f():\n    return runner.ModelRunner()"),
        "harness.bench.run": ast.parse("ModelRunner()"),
    }
    assert callers(modules, "ModelRunner") == {"harness.host.open", "harness.serve.app"}
    assert client_imports(modules) == {"harness.host.open:harness.serve.app"}
