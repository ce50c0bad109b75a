"""The programs in ``ci`` import what there is, which no other test does."""

import subprocess
import sys

import pytest

from tests.paths import ROOT

PROGRAMS = sorted((ROOT / "ci").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_it_can_be_imported(program):
    code = f"import runpy; runpy.run_path({str(program)!r}, run_name='imported')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_are_programs():
    assert PROGRAMS
