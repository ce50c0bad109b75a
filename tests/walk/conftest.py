"""A newcomer: the shipped wheel in an environment of its own, an empty home, no special rights."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

SOURCES = ("accel", "contract", "harness", "reference", "LICENSE", "README.md", "pyproject.toml")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.egg-info", "built")
NOBODY = 65534
CLOSED = "127.0.0.1:9"
"""An address at which nothing listens: whoever asks for it is offline."""
MODEL = "tiny.gguf"
SAME_MODEL = ("model.gguf", "m.gguf", "a.gguf", "b.gguf", "mine.gguf")
"""Names of model files in README and docs."""


@dataclass(frozen=True)
class Newcomer:
    """A user whose home is ``home`` and whose Python has the wheel installed."""

    home: Path
    python: Path
    user: int | None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a terminal without features, of a machine that is offline."""
        return {
            "HOME": str(self.home), "PATH": f"{self.python.parent}:/usr/bin:/bin", "TERM": "dumb",
            "COLUMNS": "80", "LANG": "C.UTF-8", "HF_ENDPOINT": f"http://{CLOSED}",
            "PIP_INDEX_URL": f"http://{CLOSED}/simple", "PIP_CONFIG_FILE": os.devnull,
        }  # fmt: skip

    def start(self, *words: str, **options: int) -> subprocess.Popen[str]:
        """A command that runs on; its outputs are pipes."""
        return subprocess.Popen(
            words, cwd=self.home, env=self.environment, user=self.user, text=True,
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )  # fmt: skip

    def run(self, *words: str, given: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        """A command that ends, with ``given`` as its standard input, which is no terminal."""
        return subprocess.run(
            words, cwd=self.home, env={**self.environment, **more}, user=self.user, text=True,
            input=given, capture_output=True, timeout=PROCESS_SECONDS,
        )  # fmt: skip

    def zinc(self, *words: str, given: str = "") -> str:
        """What a command that succeeds prints."""
        done = self.run("zinc-rt", *words, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel that pip builds of this source for this machine, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _build(folder)
    (found,) = folder.glob("*.whl")
    return found


def _build(folder: Path) -> None:
    """Build the wheel into a new folder."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=NOT_SOURCES)
        else:
            shutil.copy(ROOT / name, source / name)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    words += ["--wheel-dir", str(folder), str(source)]
    built = subprocess.run(words, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert built.returncode == 0, built.stderr
    shutil.rmtree(source)


@pytest.fixture(scope="session")
def newcomer(wheel) -> Iterator[Newcomer]:
    """As another user than root, where this user may read Python's packages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        environment, home = folder / "env", folder / "home"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        words = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
        offline = ("--no-deps", "--no-index", "--no-compile", str(wheel))
        # A path of this process would make pip find the package installed already.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(
            [*words, *offline], check=True, capture_output=True, timeout=PROCESS_SECONDS, env=own
        )
        packages = sysconfig.get_paths()["purelib"]
        (site,) = environment.glob("lib/python*/site-packages")
        # The dependencies are those of the tests, behind the wheel's own packages.
        (site / "dependencies.pth").write_text(f"{packages}\n")
        home.mkdir()
        write_synthetic(home / MODEL, SynthSpec(quant="q8_0", seed=3, context=1 << 15))
        for link in SAME_MODEL:
            shutil.copy(home / MODEL, home / link)
        user = _unprivileged(Path(packages))
        if user is not None:
            # Who cannot write beside the modules compiles all of them for every command.
            for path in (home, *home.iterdir(), site, *site.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
        yield Newcomer(home, python, user)


def _unprivileged(packages: Path) -> int | None:
    """The user to run as: nobody if this is root and nobody may read the packages."""
    if os.geteuid() != 0:
        return None
    readable = subprocess.run(["test", "-x", str(packages)], user=NOBODY, check=False)
    return NOBODY if readable.returncode == 0 else None
