"""Compiles Metal texts of the kernel dialect as C++ for the simulated device."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from accel.metal.objc import TIER
from contract.errors import TierUnavailable

FOLDER = Path(__file__).parent
SHIM = FOLDER / "shim"
OPTIONS = ("-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror")
HEADER = "metal_stdlib"
KERNEL_OPTIONS = (
    *("-Wno-attributes", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    "-Wno-unused-variable",
)
EXACT = ("-O1", "-ffp-contract=off")
REGROUPING = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")
# -ffast-math links what makes the loading thread flush subnormal numbers to zero.
FAST = ("-O2", *REGROUPING, "-freciprocal-math", "-ffinite-math-only")
"""Metal's default: sums regrouped, products fused into them."""
ENTRY = re.compile(r"^(?:KERNEL\((?P<name>\w+)\)|kernel void (?P<whole>\w+)\()", re.MULTILINE)
TAIL = '#define ENTRY {entry}\n#include "run.h"\n'
NO_COMPILER = "the simulated Metal device compiles kernels with g++, which is not installed"
COMPILER_HINT = "apt-get install g++"


class CompileError(Exception):
    """The compiler rejected a text; the message is its log."""


def entry_of(text: str) -> str:
    """The name of a text's kernel, empty if it has none."""
    found = ENTRY.search(text)
    if found is None:
        return ""
    return f"launch_{found['name']}" if found["name"] else found["whole"]


@dataclass(frozen=True, slots=True)
class FakeCompiler:
    """Compiles texts to shared libraries, cached in the folder ``cache``."""

    cache: Path

    def kernel(self, text: str, fast: bool) -> Path:
        """The library of a kernel's text, with operations as written unless ``fast``. Raises
        CompileError."""
        whole = text + TAIL.format(entry=entry_of(text))
        options = (*KERNEL_OPTIONS, *(FAST if fast else EXACT))
        return self._compiled(whole, ("-I", str(self._headers(options)), *options))

    def runtime(self) -> Path:
        """The library of the Objective-C runtime."""
        text = (FOLDER / "fake_runtime.cpp").read_text(encoding="utf-8")
        return self._compiled(text, ("-O1",))

    def _headers(self, options: tuple[str, ...]) -> Path:
        """The folder of Metal's headers, precompiled because parsing those of C++ for every kernel
        takes two fifths of its compile time."""
        texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(SHIM.iterdir())}
        folder = self.cache / _name(*options, *texts, *texts.values())
        if folder.exists():
            return folder
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache) as parent:
            made = Path(parent, "headers")
            made.mkdir()
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            _compile(made / HEADER, made / f"{HEADER}.gch", (*options, "-x", "c++-header"))
            # Another process may have been first.
            with suppress(OSError):
                made.rename(folder)
        return folder

    def _compiled(self, text: str, options: tuple[str, ...]) -> Path:
        library = self.cache / f"{_name(*options, text)}.so"
        if library.exists():
            return library
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache) as folder:
            source, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            source.write_text(text, encoding="utf-8")
            _compile(source, made, options)
            os.replace(made, library)
        return library


def _name(*words: str) -> str:
    """A digest of everything that the compiled file depends on."""
    _, version = _compiler()
    return hashlib.sha256("\0".join((version, *OPTIONS, *words)).encode()).hexdigest()


def _compile(source: Path, to: Path, options: tuple[str, ...]) -> None:
    compiler, _ = _compiler()
    command = [compiler, *OPTIONS, *options, "-o", str(to), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr)


@cache
def _compiler() -> tuple[str, str]:
    """The path of g++ and its version. Raises TierUnavailable."""
    path = shutil.which("g++")
    if path is None:
        raise TierUnavailable(TIER, NO_COMPILER, COMPILER_HINT)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, done.stdout.splitlines()[0]
