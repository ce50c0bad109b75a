"""Metal texts of the kernel dialect compiled as C++ for the simulated device."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from accel.metal.objc import TIER
from contract.errors import TierUnavailable

FOLDER = Path(__file__).parent
SHIM = FOLDER / "shim"
OPTIONS = ("-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror")
KERNEL_OPTIONS = (
    *("-I", str(SHIM), "-Wno-attributes", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    "-Wno-unused-variable",
)
EXACT = ("-O1", "-ffp-contract=off")
FAST = ("-O2", "-ffast-math")
"""As Metal compiles unless it is told otherwise: sums regrouped, products fused into them."""
ENTRY = re.compile(r"^(?:KERNEL\((?P<name>\w+)\)|kernel void (?P<whole>\w+)\()", re.MULTILINE)
TAIL = '#define ENTRY {entry}\n#include "run.h"\n'
NO_COMPILER = "the simulated Metal device compiles kernels with g++, which is not installed"
COMPILER_HINT = "apt-get install g++"


class CompileError(Exception):
    """What the compiler says of a text."""


def entry_of(text: str) -> str:
    """The name of a text's kernel, empty where it has none."""
    found = ENTRY.search(text)
    if found is None:
        return ""
    return f"launch_{found['name']}" if found["name"] else found["whole"]


@dataclass(frozen=True, slots=True)
class FakeCompiler:
    """Shared libraries of texts, kept in the folder ``cache``."""

    cache: Path

    def kernel(self, text: str, fast: bool) -> Path:
        """The library of a kernel's text, the operations as written unless ``fast``. Raises
        CompileError."""
        whole = text + TAIL.format(entry=entry_of(text))
        shim = "".join(path.read_text(encoding="utf-8") for path in sorted(SHIM.iterdir()))
        return self._compiled(whole, (*KERNEL_OPTIONS, *(FAST if fast else EXACT)), shim)

    def runtime(self) -> Path:
        """The library of the Objective-C runtime."""
        text = (FOLDER / "fake_runtime.cpp").read_text(encoding="utf-8")
        return self._compiled(text, ("-O1",), "")

    def _compiled(self, text: str, options: tuple[str, ...], included: str) -> Path:
        compiler, version = _compiler()
        command = [compiler, *OPTIONS, *options]
        words = "\0".join((version, *command[1:], included, text))
        library = self.cache / f"{hashlib.sha256(words.encode()).hexdigest()}.so"
        if library.exists():
            return library
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache) as folder:
            source, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            source.write_text(text, encoding="utf-8")
            done = subprocess.run(
                [*command, "-o", str(made), str(source)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise CompileError(done.stderr)
            os.replace(made, library)
        return library


@cache
def _compiler() -> tuple[str, str]:
    """Where g++ is, and its version. Raises TierUnavailable."""
    path = shutil.which("g++")
    if path is None:
        raise TierUnavailable(TIER, NO_COMPILER, COMPILER_HINT)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, done.stdout.splitlines()[0]
