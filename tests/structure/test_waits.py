"""Tests wait as long as a slow or busy machine may take: nobody guesses seconds for it."""

import ast

from tests.structure.source_tree import relative, telling_nodes, trees

WAITS = ("communicate", "get", "join", "result", "wait", "wait_for")
"""Methods whose first argument is how long they wait."""
SHORT = 2.0
"""Seconds. Who waits less expects that nothing comes."""


def guessed(source: ast.AST) -> list[int]:
    """The lines that wait so many seconds for what has to happen."""
    return [
        node.lineno
        for node in telling_nodes(source)
        if isinstance(node, ast.Call)
        for value in limits(node)
        if isinstance(value, ast.Constant)
        and isinstance(value.value, int | float)
        and value.value >= SHORT
    ]


def limits(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call that say how long it waits."""
    named = [given.value for given in call.keywords if given.arg == "timeout"]
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return named + (call.args[:1] if method in WAITS else [])


def test_waits_name_the_patience_of_tests():
    """That of ``tests/patience.py``, which one can raise for all."""
    found = {relative(path): guessed(source) for path, source in trees().items()}
    assert {name: at for name, at in found.items() if at and name.startswith("tests/")} == {}


def test_a_guess_is_found():
    """Negative control."""
    source = "run(words, timeout=60)\nthread.join(5)\nthread.join(0.2)\nrun(timeout=PATIENCE)\n"
    assert guessed(ast.parse(source)) == [1, 2]
