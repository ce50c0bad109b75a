"""Builds the native library: ``python -m accel.native.build``.

Without arguments it builds the variant of this machine in the cache folder. With ``--output`` it
builds every variant for a system, as a wheel contains them."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from accel.native.c_library import NAME, build_c_library, c_library_name
from accel.native.compile import build_library, build_processor_library, find_compiler
from accel.native.library import default_cache, find_library
from accel.native.names import DIGEST_CHARACTERS, PROCESSOR, Target, library_name, this_target
from accel.native.variants import VARIANTS, machine
from contract.errors import ConfigError, ZincError
from contract.processors import processors

LIBRARY = re.compile(rf"(.+-[0-9a-f]{{{DIGEST_CHARACTERS}}}|{NAME})\.(so|dylib|dll)")
"""The names of the files of an output folder."""


def build_all(target: Target, folder: Path, jobs: int) -> list[Path]:
    """Build every variant for a target into a folder, and delete the libraries that were in it.
    Raises BuildError, ConfigError for a folder with anything else, and TierUnavailable without a
    compiler."""
    found = list(folder.iterdir()) if folder.is_dir() else []
    for old in found:
        if LIBRARY.fullmatch(old.name) is None:
            raise ConfigError(f"{folder} holds {old.name}, which is no library; name a new folder")
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    for old in found:
        old.unlink()
    made = {
        library_name(PROCESSOR, target): build_processor_library(target, compiler),
        c_library_name(target): build_c_library(target, compiler),
    }
    for variant in VARIANTS:
        if variant.machine == target.machine:
            name = library_name(variant.name, target)
            made[name] = build_library(variant, target, compiler, jobs)
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in made]


def main() -> int:
    """Build according to the arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m accel.native.build", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for every variant, as a wheel has them")
    parser.add_argument("--target", help="SYSTEM-MACHINE to build for, such as linux-aarch64")
    parser.add_argument("--jobs", type=int, default=processors())
    arguments = parser.parse_args()
    try:
        if arguments.output is None:
            print(find_library(default_cache(), print).path)
            return 0
        target = this_target(machine())
        if arguments.target:
            target = Target(*arguments.target.split("-", 1))
        for path in build_all(target, arguments.output, arguments.jobs):
            print(f"{path} {path.stat().st_size:,} bytes")
    except ZincError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
