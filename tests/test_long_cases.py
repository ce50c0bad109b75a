"""What ``ci/test`` leaves to ``ci/test --all``."""

from types import SimpleNamespace

import pytest

from tests.long_cases import EACH_VALUE_ONCE, covering, each_value_once, in_share, mark_combinations


def test_every_value_stays():
    """Of all pairs as few stay as have each value of both, the same in any order."""
    cases = {f"{a}-{b}": {("a", a), ("b", b)} for a in range(7) for b in "xyz"}
    kept = covering(cases)
    assert {value for name in kept for value in cases[name]} == set().union(*cases.values())
    assert 7 <= len(kept) <= 9
    assert covering(dict(reversed(cases.items()))) == kept


class Case:
    """A case of a test, by its number and with its markers."""

    def __init__(self, number: int, *markers: str) -> None:
        self.nodeid, self.markers = f"tests/{next(iter(EACH_VALUE_ONCE))}[{number}]", {*markers}
        self.callspec = SimpleNamespace(params={"number": number, "kind": "same"})

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.add(marker.name)


@pytest.mark.parametrize("marker", ["device", "soak", "long"])
def test_a_case_that_does_not_run_covers_nothing(marker):
    """Whatever it has, another case with the same values stays in ``ci/test``."""
    for number in range(8):
        cases = [Case(number), Case(number, marker)]
        cases[1].nodeid += marker
        mark_combinations(cases)  # type: ignore[arg-type]
        assert "long" not in cases[0].markers


def test_parameters_that_count():
    """All, those that are named, or none."""
    found = each_value_once("\na/test_b: every some:x,y\na/test_c: one: other\n")
    assert found == {
        "a/test_b.py::test_every": None,
        "a/test_b.py::test_some": frozenset({"x", "y"}),
        "a/test_c.py::test_one": frozenset(),
        "a/test_c.py::test_other": None,
    }


def test_shares_are_the_whole():
    """Each case is in one of them, and in all where none is named. None has much more of a file
    than another."""
    cases = [f"tests/folder/test_file.py::test[{number}]" for number in range(400)]
    found = [[name for name in cases if in_share(name, f"{n}/4")] for n in range(4)]
    assert sorted(name for share in found for name in share) == sorted(cases)
    assert all(80 < len(share) < 120 for share in found)
    assert all(in_share(name, "") for name in cases)


def test_tests_of_the_same_parameters_are_in_one_share():
    """A file opens each model once in a run, not once for each of its tests in another one."""
    for number in range(20):
        names = [f"tests/folder/test_file.py::test_{name}[{number}]" for name in "abc"]
        assert len({tuple(in_share(one, f"{n}/4") for n in range(4)) for one in names}) == 1
    alone = [f"tests/folder/test_file.py::test_{name}" for name in range(40)]
    assert 0 < sum(in_share(one, "0/4") for one in alone) < 40
