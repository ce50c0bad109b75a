"""Processors that the tier may keep busy, and the folder that its build fills."""

import math
import os
from pathlib import Path

import pytest

from accel.native.build import build_all
from accel.native.host import processor_name, processor_quota, processors, total_memory
from accel.native.names import Target
from contract.errors import ConfigError


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


def test_the_machine_has_a_name_and_memory():
    """As far as any machine."""
    assert processor_name()
    assert total_memory() > 1 << 28


def test_a_folder_with_files_of_others_is_refused(tmp_path):
    """Old libraries go; nothing else is deleted, and they only with nothing else."""
    (tmp_path / "processor-0123456789abcdef.so").write_bytes(b"old")
    (tmp_path / "notes.txt").write_bytes(b"notes of years")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, which is no library"):
        build_all(Target("linux", "x86_64"), tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "processor-0123456789abcdef.so",
    ]
