"""Cases that only ``ci/test --all`` runs.

They prove nothing of a kernel, format, family, dialect or fault that no case of ``ci/test`` does:
they combine the same ones in more ways, or a compiler takes long for them."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import pytest

SHARE = "ZINC_RT_LONG_SHARE"
"""An environment variable: 2/4 is the third of four shares of the long tests, counted from 0."""

ELSEWHERE = ("device", "long", "soak")
"""Markers of cases that ``ci/test`` does not run."""

ONCE = Path(__file__).with_name("long_cases.txt").read_text()
"""Tests of which ``ci/test`` runs each value of each parameter once, be it a tier, a format, a
family or a fault, and ``--all`` every combination. Behind a colon: the parameters that count; where
none does, one case is enough."""


def each_value_once(text: str) -> dict[str, frozenset[str] | None]:
    """The tests of a text like ONCE, and which parameters count, None if all do."""
    found: dict[str, frozenset[str] | None] = {}
    for line in text.split("\n")[1:-1]:
        file, names = line.split(": ", 1)
        for entry in names.split(" "):
            name, marked, counting = entry.partition(":")
            which = frozenset(counting.split(",")) - {""} if marked else None
            found[f"{file}.py::test_{name}"] = which
    return found


EACH_VALUE_ONCE = each_value_once(ONCE)


def long_except(names: Iterable[object], *short: object) -> list[Any]:
    """Parameters of those names, marked ``long`` but for ``short``."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.long]) for name in names]


def covering(cases: Mapping[str, Set[tuple[str, object]]]) -> set[str]:
    """Names of cases that have all values, chosen by digests of the names: the same ones in every
    process, and each value beside various others."""
    met: set[tuple[str, object]] = set()
    chosen = set()
    for name in sorted(cases, key=_digest):
        if not cases[name] <= met or not cases[name]:
            chosen.add(name)
        met |= cases[name]
    return chosen


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Marks ``long`` the cases of EACH_VALUE_ONCE whose values other cases have. A case that
    ``ci/test`` does not run has them for nobody."""
    tests: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in EACH_VALUE_ONCE and not any(map(item.get_closest_marker, ELSEWHERE)):
            tests[name][item.nodeid] = item
    for test, cases in tests.items():
        values = {one: _values(cases[one], EACH_VALUE_ONCE[test]) for one in cases}
        for nodeid in cases.keys() - covering(values):
            cases[nodeid].add_marker(pytest.mark.long)


def in_share(nodeid: str, share: str | None = None) -> bool:
    """Whether a long test is in the share that the environment names. Each share has some of every
    file: of four shares by file, one took twice as long as another. Tests of a file with the same
    parameters are in the same share, since they open the same model on the same tier."""
    named = os.environ.get(SHARE, "") if share is None else share
    if not named:
        return True
    number, shares = map(int, named.split("/"))
    test, bracket, parameters = nodeid.partition("[")
    told = test.partition("::")[0] + bracket + parameters if bracket else test
    return int(_digest(told), 16) % shares == number


def _values(item: pytest.Item, counting: frozenset[str] | None) -> set[tuple[str, object]]:
    """The parameters of a test that count. Equal values are one; two equal tuples of a file may be
    one object in one process and two in another."""
    found = getattr(item, "callspec", None)
    if counting is not None and not counting:
        return {("any case", None)}
    return {
        (name, value if _has_hash(value) else id(value))
        for name, value in (found.params.items() if found is not None else ())
        if counting is None or name in counting
    }


def _has_hash(value: object) -> bool:
    """A tuple of lists has none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _digest(text: str) -> str:
    """The same order in every process."""
    return hashlib.sha256(text.encode()).hexdigest()
