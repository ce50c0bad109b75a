"""``ci/environment.sh``: who makes ``.venv``, and when what is there is made anew."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

INSTALL = """. ci/environment.sh
is_whole() { [ -e .venv/made ]; }
pip_install() { echo "$2 begins" >>log; sleep 0.2; echo "$2 ends" >>log; }
make_environment
install_project extra
"""
"""Makes the environment and installs, both of which only take a while and are noted."""
PYTHON = f"""#!/bin/sh
[ "$1" = -m ] || exec {sys.executable} "$@"
mkdir -p .venv; sleep 0.2; : >.venv/made; echo made >>log
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the scripts that make an environment, and nothing else."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "environment.sh", tmp_path / "ci")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def script(checkout: Path, text: str) -> subprocess.Popen[str]:
    """A shell script in ``ci``. The Python it finds is this one, but makes no environment."""
    return subprocess.Popen(
        ["sh", "-c", text, "ci/script"], cwd=checkout, text=True, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / "python")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_scripts_at_the_same_time_install_once(checkout):
    """The others wait, and find that all is there."""
    started = [script(checkout, INSTALL) for _ in range(3)]
    said = [process.communicate(timeout=PROCESS_SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    lines = (checkout / "log").read_text().splitlines()
    assert lines == ["made", "pip begins", "pip ends", ".[extra] begins", ".[extra] ends"]


def no_list(site: Path) -> None:
    (site / "other-1.0.dist-info" / "RECORD").unlink()


def no_pip(site: Path) -> None:
    shutil.rmtree(site / "pip-1.0.dist-info")


def no_pip_package(site: Path) -> None:
    shutil.rmtree(site / "pip")


def no_site(site: Path) -> None:
    shutil.rmtree(site)


@pytest.mark.parametrize("damage", [None, no_list, no_pip, no_pip_package, no_site])
def test_an_environment_that_was_interrupted_is_noticed(checkout, damage):
    """pip unpacks a package before it lists its files, and its own old self goes first."""
    base = Path(sys.base_prefix, "bin", "python3")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = checkout / ".venv" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (checkout / ".venv" / "bin").mkdir()
    (checkout / ".venv" / "bin" / "python").symlink_to(base)
    (checkout / ".venv" / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\n"
    )
    for name in ("pip", "other"):
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
        (site / f"{name}-1.0.dist-info").mkdir()
        (site / f"{name}-1.0.dist-info" / "RECORD").touch()
    if damage is not None:
        damage(site)
    asked = script(checkout, ". ci/environment.sh; is_whole && echo whole || echo damaged")
    assert asked.communicate(timeout=PROCESS_SECONDS)[0] == ("damaged\n" if damage else "whole\n")
