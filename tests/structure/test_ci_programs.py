"""The programs in ``ci`` import what there is: no type checker and no other test reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PROGRAMS = sorted((ROOT / "ci").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_it_tells_its_options(program: Path) -> None:
    text = subprocess.check_output([sys.executable, str(program), "--help"], text=True)
    assert text.startswith("usage: ")


def test_there_are_programs() -> None:
    assert PROGRAMS
