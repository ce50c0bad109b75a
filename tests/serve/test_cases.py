"""The table of cases: each names what happens now and tests that exist and are not left out."""

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

TABLE = Path(__file__).with_name("cases.toml")
ROWS = {"reports": 15, "server": 19, "scheduler": 14}
"""Rows of the numbered tables."""
LEFT_OUT = ("skip", "skipif", "xfail", "soak", "device", "walk", "lm_eval")
"""Marks of tests that the ordinary suite leaves out or lets fail."""
NAMED: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(TABLE.read_text())


def path_of(file: str) -> Path:
    return ROOT / file if "/" in file else TABLE.parent / file


@cache
def declared_in(path: Path) -> dict[str, set[str]]:
    """The tests of a file, each with the words of its marks."""
    body = ast.parse(path.read_text()).body
    return {
        each.name: {word for mark in each.decorator_list for word in words_of(mark)}
        for each in body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    }


def words_of(mark: ast.expr) -> set[str]:
    """The attributes that a decorator is named by."""
    named = mark.func if isinstance(mark, ast.Call) else mark
    return {each.attr for each in ast.walk(named) if isinstance(each, ast.Attribute)}


def problems_of(row: dict[str, Any]) -> list[str]:
    """What a row lacks."""
    found = [f"no {key}" for key in ("input", "now", "tests") if not row.get(key)]
    for test in row.get("tests", ()):
        file, _, function = test.partition("::")
        path = path_of(file)
        known = declared_in(path) if path.is_file() else {}
        if function not in known:
            found.append(f"there is no test {test}")
        found += [
            f"{test} is marked {mark}" for mark in LEFT_OUT if mark in known.get(function, ())
        ]
    return found


@pytest.mark.parametrize("table", sorted(NAMED))
def test_every_case_is_held_by_tests(table):
    assert not {key: found for key, row in NAMED[table].items() if (found := problems_of(row))}


@pytest.mark.parametrize("table", sorted(ROWS))
def test_every_row_has_an_answer(table):
    assert sorted(map(int, NAMED[table])) == list(range(1, ROWS[table] + 1))


@pytest.mark.parametrize(
    "test",
    [
        "test_nowhere.py::test_every_case_is_held_by_tests",
        "test_cases.py::test_that_is_not_there",
        "tests/serve/test_cases.py::problems_of",
        "tests/simulation/test_adversaries.py::test_nothing_breaks_for_long",
    ],
)
def test_a_test_that_does_not_run_holds_nothing(test):
    """Negative control."""
    assert problems_of({"input": "a", "now": "b", "tests": [test]})
