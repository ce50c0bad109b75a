"""The folder that ``python -m accel.native.build --output`` fills."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.native.build import build_all
from accel.native.names import Target
from contract.errors import ConfigError


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path) -> None:
    """Old libraries go; nothing else is deleted, and they only with nothing else."""
    (tmp_path / "processor-0123456789abcdef.so").write_bytes(b"old")
    (tmp_path / "notes.txt").write_bytes(b"notes of years")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, which is no library"):
        build_all(Target("linux", "x86_64"), tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "processor-0123456789abcdef.so",
    ]
