"""Facts about a run: source revision, definitions, device and machine."""

import hashlib
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accel
import contract
import harness
import reference
from contract.arithmetic import ARITHMETIC_VERSION
from contract.ir.opcode_table import markdown_table
from contract.ops import TABLE
from contract.tier import TierInfo
from harness import goldens

PACKAGES = {"contract": contract, "reference": reference, "accel": accel, "harness": harness}
DISTRIBUTION = "zinc-rt"
GIT_SECONDS = 10.0
DRIVER_PACKAGES = ("numpy", "cffi", "cuda-bindings", "nvidia-cuda-nvrtc")
GOLDENS = (goldens.SYNTHETIC, goldens.DEFAULT_MODEL)


def source_facts() -> dict[str, Any]:
    """The version, the commit, whether files were changed since, and a digest of every package.

    ``commit`` and ``dirty`` are None outside a git checkout."""
    root = Path(harness.__file__).parents[1]
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changes = _git(root, "status", "--porcelain") if commit else None
    return {
        "version": _version(DISTRIBUTION),
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "packages": {
            name: tree_digest(Path(package.__path__[0])) for name, package in PACKAGES.items()
        },
    }


def tree_digest(folder: Path) -> str:
    """SHA-256 over the paths and contents of a package's files, without caches."""
    digest = hashlib.sha256()
    for path in _source_files(folder):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _source_files(folder: Path) -> Iterable[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    sources = (path for path in files if "__pycache__" not in path.parts)
    return sorted(sources, key=lambda path: path.relative_to(folder).as_posix())


def definition_facts() -> dict[str, Any]:
    """Inputs that determine the correct results: two runs that differ here are not comparable."""
    source = source_facts()["packages"]
    return {
        "arithmetic": ARITHMETIC_VERSION,
        "opcode_table": hashlib.sha256(markdown_table().encode()).hexdigest(),
        "contract": source["contract"],
        "reference": source["reference"],
        "goldens": {name: _file_digest(goldens.FOLDER / name) for name in GOLDENS},
    }


def tier_facts(info: TierInfo) -> dict[str, Any]:
    """The device and its driver."""
    return {
        "name": info.name,
        "device": info.device,
        "driver": info.driver,
        "arithmetic": info.arithmetic,
        "opcodes": [TABLE[opcode].name for opcode in sorted(info.opcodes)],
        "memory_bytes": info.memory_bytes,
        "host_unified": info.host_unified,
        "packages": {name: _version(name) for name in DRIVER_PACKAGES},
    }


def _file_digest(path: Path) -> str | None:
    """The SHA-256 of a file; None if it is absent, as in an installation without its checkout."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(root: Path, *words: str) -> str | None:
    """The output of git; None when git fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
