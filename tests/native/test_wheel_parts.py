"""What the wheel of a system leaves out: nothing else needs it, and it says why."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from accel.wheel_parts import PARTS, SYSTEM_NAMES, WheelPart, is_left_out, missing_part, part_of
from accel.wheel_parts import SYSTEMS as PLATFORMS
from tests.cli.conftest import environment
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

ROOMS = ("contract", "reference", "accel", "harness")
SYSTEMS = sorted(SYSTEM_NAMES)


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that Python loads with a module: imports outside of functions and types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


@cache
def parts_imported(text: str) -> tuple[tuple[str, WheelPart], ...]:
    """What a text imports of the parts that some system leaves out. All systems are asked of each
    text, and parsing all takes seconds."""
    parts = ((name, part_of(name)) for name in imported(ast.parse(text)))
    return tuple((name, part) for name, part in parts if part is not None)


def needed_though_absent(system: str, path: Path, text: str) -> list[str]:
    """What a file of the wheel imports that the wheel does not have."""
    if is_left_out(path, system):
        return []
    return [name for name, part in parts_imported(text) if system not in part.systems]


def test_every_part_is_there():
    for part in PARTS:
        folder = ROOT / part.path
        assert folder.is_dir() or folder.with_suffix(".py").is_file(), part.name


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_that_stays_needs_what_is_left_out(system):
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            within = path.relative_to(ROOT)
            assert needed_though_absent(system, within, path.read_text("utf-8")) == [], within


def test_a_module_that_needs_it_would_be_found():
    path = Path("accel/amd/tools/trace.py")
    text = "from accel.amd.sim.translate import check_translation"
    assert needed_though_absent("linux", path, text) == [
        "accel.amd.sim.translate.check_translation"
    ]
    assert needed_though_absent("linux", path, f"def late():\n    {text}") == []
    assert needed_though_absent("macos", path, text) == []


FILES = """
import json, sys
from setuptools import Distribution
from setuptools.command.build_py import build_py
from accel.native.wheel_backend import SUFFIX, _without

def files(system):
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    command = build_py(distribution)
    command.finalize_options()
    with _without(SUFFIX, system):
        found = [one[-1] for one in command.find_all_modules()]
        command.manifest_files = {}
        for package in command.packages:
            found += command.find_data_files(package, command.get_package_dir(package))
    return found

print(json.dumps([SUFFIX, {system: files(system) for system in ("", *sys.argv[1:])}]))
"""
"""Run by a process of its own: setuptools replaces modules that others have loaded."""


@pytest.fixture(scope="module")
def collected() -> tuple[str, dict[str, set[str]]]:
    """The ending of libraries, and the files that setuptools collects for each system."""
    done = subprocess.run(
        [sys.executable, "-c", FILES, *SYSTEMS],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    suffix, found = json.loads(done.stdout.splitlines()[-1])
    return suffix, {
        system: {(ROOT / one).resolve().relative_to(ROOT).as_posix() for one in files}
        for system, files in found.items()
    }


@pytest.mark.parametrize(
    ("system", "has", "lacks"),
    [
        ("linux", ("amd/tier.py", "amd/tools/trace.py", "intel/tier.py"), ("metal/tier.py",)),
        ("macos", ("metal/tier.py", "vulkan/tier.py"), ("cuda/tier.py", "intel/tier.py")),
        ("windows", ("cuda/tier.py", "vulkan/tier.py"), ("amd/tier.py", "metal/tier.py")),
    ],
)
def test_the_files_of_a_wheel(collected, system, has, lacks):
    """As setuptools collects them; a wheel of any system has all of them."""
    suffix, files = collected
    here, everywhere = files[system], files[""]
    assert {f"accel/{name}" for name in (*has, *lacks)} <= everywhere
    assert {f"accel/{name}" for name in has} <= here
    assert {name for name in everywhere - here if not is_left_out(Path(name), system)} == set()
    assert not {name for name in here if is_left_out(Path(name), system)}
    assert {f"accel/{name}" for name in lacks} <= everywhere - here
    assert {"accel/metal/sim/fake_metal.py", "accel/amd/sim/execute.py"} <= everywhere - here
    assert not any(name.endswith(suffix) for name in everywhere)


WITHOUT = """
import sys
sys.modules |= {"accel.metal": None, "accel.amd.sim": None}
from contract.errors import TierUnavailable
from harness import tiers
from harness.cli.main import main

tiers.TIER_NAMES = ("metal",)
(status,) = tiers.probe()
print(status.available, status.reason, status.remedy, sep="|")
for words in (["asm", "rope.k"], ["pm4-test", "--device", "simulated"]):
    print(main(words))
"""


def test_what_was_left_out_says_which_system_it_needs():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    here = SYSTEM_NAMES[PLATFORMS[sys.platform]]
    said, *codes = done.stdout.splitlines()
    assert said == f"False|this wheel for {here} has no accel.metal|Metal needs macOS"
    assert codes == ["2"] * 2
    lines = done.stderr.splitlines()
    simulated = f"error: this wheel for {here} has no accel.amd.sim; simulated GPUs"
    assert [line.startswith(simulated) for line in lines] == [True, True]


def test_other_modules_have_no_such_reason():
    assert missing_part("accel.vulkan") is None
    assert missing_part("accel.metallic") is None
    assert missing_part("flask") is None
