"""What ``ci/test`` leaves to ``ci/test --all``."""

from __future__ import annotations

from tests.long_cases import covering, each_value_once, in_share


def test_every_value_stays() -> None:
    """Of all pairs as few stay as have each value of both, the same in any order."""
    cases = {f"{a}-{b}": {("a", a), ("b", b)} for a in range(7) for b in "xyz"}
    kept = covering(cases)
    assert {value for name in kept for value in cases[name]} == set().union(*cases.values())
    assert 7 <= len(kept) <= 9
    assert covering(dict(reversed(cases.items()))) == kept


def test_parameters_that_count() -> None:
    """All, those that are named, or none."""
    found = each_value_once("\na/test_b: every some:x,y\na/test_c: one:\n")
    assert found == {
        "a/test_b.py::test_every": None,
        "a/test_b.py::test_some": frozenset({"x", "y"}),
        "a/test_c.py::test_one": frozenset(),
    }


def test_shares_are_the_whole() -> None:
    """Each file is in one of them, and in all where none is named."""
    files = [f"tests/folder/test_{number}.py" for number in range(40)]
    found = [[name for name in files if in_share(f"{name}::test", f"{n}/4")] for n in range(4)]
    assert sorted(name for share in found for name in share) == sorted(files)
    assert all(found)
    assert all(in_share(name, "") for name in files)
