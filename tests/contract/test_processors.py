"""Processors that this process may keep busy, and what else is known of the machine."""

import math
import os
from pathlib import Path

import pytest

from contract.processors import processor_name, processor_quota, processors
from reference.cpu.tier import CpuTier
from tests.named_tiers import quick_tier
from tests.paths import ROOT
from tests.structure.source_tree import PRODUCT, python_files, relative


def _group(tmp_path: Path, quotas: dict[str, str]) -> tuple[Path, Path]:
    """A hierarchy of control groups, in one of which, ``a/b``, this process is."""
    groups = tmp_path / "groups"
    (groups / "a" / "b").mkdir(parents=True)
    for folder, quota in quotas.items():
        (groups / folder / "cpu.max").write_text(f"{quota}\n")
    own = tmp_path / "own"
    own.write_text("12:memory:/elsewhere\n0::/a/b\n")
    return groups, own


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, math.inf),
        ({"a/b": "max 100000"}, math.inf),
        ({"a/b": "50000 100000"}, 0.5),
        ({"a": "150000 100000", "a/b": "max 100000"}, 1.5),
        ({"": "20000 100000", "a/b": "300000 100000"}, 0.2),
        ({"a/b": "not a quota"}, math.inf),
    ],
)
def test_the_smallest_quota_on_the_way_counts(tmp_path, quotas, expected):
    """A group cannot have more than those it is in."""
    assert processor_quota(*_group(tmp_path, quotas)) == expected


@pytest.mark.parametrize(
    ("named", "folder"), [("cpu", "cpu"), ("cpu,cpuacct", "cpu,cpuacct"), ("cpuacct,cpu", "cpu")]
)
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, math.inf),
        ({"a/b": -1}, math.inf),
        ({"a/b": 50000}, 0.5),
        ({"a": 150000, "a/b": -1}, 1.5),
        ({"": 20000}, 0.2),
        ({"a/b": "not a quota"}, math.inf),
    ],
)
def test_quotas_of_version_1_count_too(tmp_path, named, folder, quotas, expected):
    """Older systems have a hierarchy a controller, and a container sees its own group as root. The
    folder's name may have the controllers in another order, but there is a link."""
    for place, quota in quotas.items():
        group = tmp_path / "groups" / folder / place
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    own = tmp_path / "own"
    own.write_text(f"4:memory:/elsewhere\n3:cpuset:/c\n2:{named}:/a/b\n0::/\n")
    assert processor_quota(tmp_path / "groups", own) == expected


@pytest.mark.parametrize("line", ["", "0", "0:", "x:y", "0::/\xff", "::", "\n\n"])
def test_a_line_of_another_form_is_no_error(tmp_path, line):
    """The quota of the root counts, as without a file."""
    groups, own = _group(tmp_path, {"": "20000 100000"})
    own.write_bytes(line.encode("latin-1"))
    assert processor_quota(groups, own) == (0.2 if "::" in line or not line else math.inf)


def test_less_than_one_processor_is_one_worker(tmp_path):
    """Two would only wait for each other."""
    assert processors(*_group(tmp_path, {"a/b": "30000 100000"})) == 1


def test_without_groups_every_allowed_processor_counts(tmp_path):
    """Systems without them have no such files."""
    nothing = tmp_path / "nothing"
    assert processors(nothing, nothing) == len(os.sched_getaffinity(0))


def test_the_processor_has_a_name():
    """As far as any has."""
    assert processor_name()


def test_every_tier_on_the_processor_calls_it_by_that_name():
    """And nothing else asks the system for one, which knows less."""
    with CpuTier() as cpu, quick_tier() as native:
        assert cpu.info.device == native.info.device == processor_name()
    product = [path for path in python_files() if path.relative_to(ROOT).parts[0] in PRODUCT]
    asking = [path for path in product if "platform.processor" in path.read_text(encoding="utf-8")]
    assert [relative(path) for path in asking] == ["contract/processors.py"]
