"""A machine with PoCL and without the linker that it calls: PoCL would end the process."""

import os
import subprocess
import sys
from pathlib import Path

from harness.tiers import LINKER_REMEDY
from tests.patience import PROCESS_SECONDS


def test_its_lack_is_told(device, tiny_model_path: Path, tmp_path: Path) -> None:
    """In one line, with what to do, where no kernel is there from before."""
    words = ("--tier", "opencl", "--model", str(tiny_model_path))
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", "a", *words],
        env={
            **os.environ,
            "PATH": str(tmp_path),
            "POCL_CACHE_DIR": str(tmp_path / "pocl"),
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PROCESS_SECONDS,
    )
    said = "error: tier opencl is not available: its driver ends the process (status "
    assert done.stderr.startswith(said)
    assert done.stderr.endswith(f"; {LINKER_REMEDY}\n")
    assert (done.stdout, done.returncode) == ("", 2)
