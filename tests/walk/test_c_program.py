"""The C program of docs/examples, against the header and the library that the wheel installs."""

import re
from pathlib import Path

import pytest

from tests.native.c_plan import compiled, run
from tests.paths import ROOT
from tests.walk.conftest import MODEL

pytestmark = pytest.mark.walk


def test_a_program_decodes_with_what_the_wheel_has(newcomer, tmp_path):
    """The digest is that of ``zinc-rt logits``, and the files lie in the installed packages."""
    said = newcomer.zinc("export-plan", "wheel.plan", "--model", MODEL, "--context", "128")
    found = re.search(r"^compile +.* (\S+/libzinc_rt\.\w+) -I (\S+) ", said, re.MULTILINE)
    assert found is not None, said
    for path in found.groups():
        assert "site-packages/accel/native/" in path
        assert newcomer.run("test", "-r", path).returncode == 0
    program = compiled(
        tmp_path / "decode", [ROOT / "docs/examples/decode.c"], found[1], include=Path(found[2])
    )
    code, out, err = run(program, newcomer.home / "wheel.plan", "1,2,3", 4)
    assert (code, err) == (0, "")
    logits = newcomer.zinc("logits", "--tokens", "1,2,3", "--model", MODEL)
    assert out.splitlines()[0] == logits.splitlines()[0]
