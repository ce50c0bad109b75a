"""What ``ci/test`` keeps of devices that a processor plays."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.long_cases import ONCE, SHARE, each_value_once
from tests.played import (
    BESIDE,
    EACH_DEVICE,
    NONE_KEPT,
    ON_CARDS_SOAK,
    SCHEDULES,
    SMOKES,
    mark_played,
)
from tests.tiers.ways import MODELS

TESTS = Path(__file__).parent
EVERY_RUN = "not device and not soak and not long"


class Case:
    """A case of a test, with its fixtures and markers."""

    def __init__(
        self, test: str, way: str, *markers: str, fixture: str = "tiny_model_path"
    ) -> None:
        self.nodeid, self.markers = f"tests/{test}[{way}]", {*markers}
        self.fixturenames = ["tier", fixture]
        self.callspec = SimpleNamespace(params={"runners": (("model", way), 1)})

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.add(marker.name)


def kept(cases: Iterable[Case]) -> list[str]:
    """The ways of the cases that ``ci/test`` runs."""
    found = list(cases)
    mark_played(found)  # type: ignore[arg-type]
    return [one.nodeid.partition("[")[2][:-1] for one in found if not one.markers]


@pytest.mark.parametrize(
    ("test", "ways", "stay"),
    [
        ("engine/test_a.py::test_b", ["cpu", "late", "opencl", "vulkan"], ["cpu", "late"]),
        ("tiers/test_a.py::test_b", ["opencl-banked", "vulkan", "metal-simulated"], ["vulkan"]),
        (next(iter(EACH_DEVICE)), ["cpu", "opencl-banked", "opencl", "amd-kfd"],
         ["cpu", "opencl", "amd-kfd"]),
        ("cuda/test_a.py::test_b", ["plain", "odd"], ["plain", "odd"]),
    ],
)  # fmt: skip
def test_what_stays(test, ways, stay):
    """Cases elsewhere; one where there are none; of a smoke the plainest way of each device."""
    assert kept(Case(test, way) for way in ways) == stay


@pytest.mark.parametrize(
    ("folder", "stay"),
    [("engine", ["cpu-a", "cpu-longer", "late-a", "native-b"]),
     ("memory", ["cpu-a", "cpu-b", "cpu-longer", "late-a", "native-b"])],
)  # fmt: skip
def test_what_stays_of_the_cpu_tier(folder, stay):
    """A case of each test, and what no quicker tier has."""
    ways = ("cpu-a", "cpu-b", "cpu-longer", "late-a", "native-b")
    cases = [Case(f"{folder}/test_a.py::test_b", way) for way in ways]
    for case, way in zip(cases, ways, strict=True):
        case.callspec.params = {"tier": way.partition("-")[0]}
    assert kept(cases) == stay


def test_what_stays_of_emulated_blocks():
    """A case of each test; none of those that another test stands for."""
    assert kept(Case("cuda/test_a.py::test_b", way, fixture="folder") for way in "xyz") == ["x"]
    assert kept(Case(next(iter(NONE_KEPT)), way, fixture="folder") for way in "xyz") == []


def test_schedules_on_a_card_are_soak_tests():
    """What else devices have of them, ``--all`` runs."""
    ways = ("cpu", "opencl", "vulkan")
    cases = [Case(next(iter(ON_CARDS_SOAK)), way) for way in ways]
    assert kept(cases) == ["cpu"]
    assert [case.markers for case in cases] == [set(), {"long"}, {"soak"}]


@pytest.mark.parametrize("marker", ["device", "soak", "long"])
def test_a_case_that_does_not_run_stands_for_none(marker):
    """Neither as the only one nor as the one on another tier."""
    for other in ("cpu", "cuda"):
        cases = [Case("tiers/test_a.py::test_b", "opencl"), Case("tiers/test_a.py::test_b", other)]
        cases[1].markers.add(marker)
        assert kept(cases) == ["opencl"]


def test_shares_and_every_run_are_the_whole(monkeypatch):
    """What ``ci/test`` runs is in each share; everything else in one of them."""
    ways = ("cpu", "opencl", "vulkan-own-memory")
    names = [f"engine/test_{file}.py::test_b" for file in range(12)]
    met: list[str] = []
    for number in range(4):
        monkeypatch.setenv(SHARE, f"{number}/4")
        items = [Case(name, way) for name in names for way in ways]
        pytest_collection_modifyitems(items)  # type: ignore[arg-type]
        assert sum(not one.markers for one in items) == len(names)
        met += [one.nodeid for one in items if one.markers]
    assert sorted(met) == sorted(f"tests/{name}[{way}]" for name in names for way in ways[1:])


@pytest.mark.parametrize(
    "table", [ONCE, SMOKES, BESIDE, SCHEDULES], ids=["once", "smokes", "beside", "schedules"]
)
def test_every_test_of_a_table_is_there(table):
    """One that has been renamed would run with all its cases, or with none."""
    missing = []
    for entry in each_value_once(table):
        file, _, name = entry.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [entry] if name not in names else []
    assert not missing


def test_every_device_keeps_its_proofs():
    """A sample of the conformance list and an answer of a model on each tier; and each file of
    tests with emulated blocks something."""
    smoke, sample = "tiers/test_model.py", "harness/test_conformance.py"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
         "-m", EVERY_RUN, *(str(TESTS / one) for one in (smoke, sample, "cuda"))],
        capture_output=True, text=True, check=True, cwd=TESTS.parent,
    ).stdout  # fmt: skip
    for device in ("amd", "intel", "metal", "opencl", "vulkan", "native"):
        assert f"{smoke}::test_logits_and_tokens_are_the_cpu_tiers[{device}" in found
    assert {way.partition("-")[0] for way in MODELS} == {
        *("amd", "intel", "metal", "native", "opencl", "vulkan")
    }
    for tier in ("cpu", "native", "opencl", "vulkan"):
        assert f"{sample}::test_every_tier_passes_a_sample[{tier}]" in found
    names = [path.name for path in (TESTS / "cuda").glob("test_*.py")]
    names = [name for name in names if not name.endswith(("_device.py", "_devices.py"))]
    assert not [name for name in names if f"/{name}::" not in found]
