"""The library ``libzinc_rt``, through which programs run exported plans without Python: building
and finding it."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path

from accel.native.compile import Compiler, find_compiler, run_compiler
from accel.native.library import PACKAGED, stored_library
from accel.native.names import DIGEST_CHARACTERS, Target, sources_digest, this_target
from accel.native.variants import machine
from accel.packets.build import Progress
from contract.errors import TierUnavailable

NAME = "libzinc_rt"
FOLDER = Path(__file__).parent
INCLUDE = FOLDER / "include"
"""The folder of ``zinc_rt.h``."""
SOURCES = ("abi/plan.c", "abi/read.c", "abi/step.c", "processor.c")
HEADERS = ("include/zinc_rt.h", "abi/plan_file.h", "abi/sha256.h", "abi/state.h", "abi/system.h")


def c_library_name(target: Target) -> str:
    """The file name of the library in a wheel."""
    return f"{NAME}{target.suffix}"


def definitions() -> dict[str, str]:
    """The macros that its sources need."""
    return {"ZINC_RT_BUILD": "1", "ZINC_RT_KERNELS_DIGEST": f'"{sources_digest()}"'}


def find_c_library(cache: Path, progress: Progress | None = None) -> Path:
    """The library of this machine, from the wheel or the cache folder, where it is built if need
    be. Raises TierUnavailable and BuildError."""
    target = this_target(machine())
    packaged = PACKAGED / c_library_name(target)
    if packaged.exists():
        return packaged
    path = cache / f"{NAME}-{_digest()}{target.suffix}"

    def build() -> bytes:
        if progress is not None:
            progress(f"compiling {NAME}")
        return build_c_library(target, find_compiler())

    if stored_library(path, build) is not None:
        raise TierUnavailable("native", f"{cache} cannot be written", "free disk space there")
    return path


def build_c_library(target: Target, compiler: Compiler) -> bytes:
    """The bytes of the library for a target. Raises BuildError, and OSError without disk space."""
    with tempfile.TemporaryDirectory(prefix="zinc-rt-c-") as name:
        folder = Path(name)
        for path in HEADERS:
            (folder / Path(path).name).write_bytes((FOLDER / path).read_bytes())
        begin = "".join(f"#define {macro} {value}\n" for macro, value in definitions().items())
        objects = []
        for path in SOURCES:
            source = folder / Path(path).name
            text = (FOLDER / path).read_text(encoding="utf-8")
            source.write_text(f'{begin}#line 1 "{path}"\n{text}', encoding="utf-8")
            objects.append(f"{source.stem}.o")
            command = compiler.compile_command(target, [])
            run_compiler([*command, source.name, "-o", objects[-1]], folder, path)
        library = c_library_name(target)
        run_compiler([*compiler.link_command(target), library, *objects], folder, library)
        return (folder / library).read_bytes()


@functools.cache
def _digest() -> str:
    """Hexadecimal digits that change with every text of the library, and with the kernels."""
    digest = hashlib.sha256(sources_digest().encode())
    for path in (*SOURCES, *HEADERS):
        digest.update((FOLDER / path).read_bytes())
    return digest.hexdigest()[:DIGEST_CHARACTERS]
