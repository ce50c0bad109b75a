"""The build backend: setuptools, extended to put the native library into wheels, and the compiled
kernels of each device as one archive in place of hundreds of files. What no program of the wheel's
system can run is left out (``accel.wheel_parts``).

``pip install .`` builds the variant for this machine. With ZINC_RT_WHEEL_TARGET, such as
``linux-aarch64``, a wheel has every variant of that system. An editable install puts the libraries
of this machine into the cache folder, where the tier and ``export-plan`` look for them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from accel.kernels.compiled import SUFFIX, archives
from accel.native.build import build_all
from accel.native.c_library import c_library_name, find_c_library
from accel.native.library import PACKAGED, default_cache, find_library
from accel.native.names import PROCESSOR, Target, library_name, this_target
from accel.native.variants import machine
from accel.wheel_parts import is_left_out
from contract.errors import TierUnavailable
from contract.processors import processors

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

TARGET_SETTING = "ZINC_RT_WHEEL_TARGET"
ACCEL = Path(__file__).parents[1]
STALE = Path("build")
"""The folder in which setuptools leaves files of the previous wheel."""
PLATFORM_TAGS = {
    ("linux", "x86_64"): "manylinux_2_28_x86_64",
    ("linux", "aarch64"): "manylinux_2_28_aarch64",
    ("macos", "aarch64"): "macosx_11_0_arm64",
    ("macos", "x86_64"): "macosx_11_0_x86_64",
    ("windows", "x86_64"): "win_amd64",
}
"""The platform tag of wheels for each target of ``ZINC_RT_WHEEL_TARGET``."""


def build_wheel(wheel_directory: str, *arguments: Any, **settings: Any) -> str:
    """See PEP 517."""
    with _libraries() as (tag, system), _tagged(tag), archives(ACCEL), _without(SUFFIX, system):
        return str(build_meta.build_wheel(wheel_directory, *arguments, **settings))


def build_editable(wheel_directory: str, *arguments: Any, **settings: Any) -> str:
    """See PEP 660."""
    for find in (find_library, find_c_library):
        try:
            find(default_cache(), _say)
        except TierUnavailable as error:
            _say(f"not built: {error}")
    with warnings.catch_warnings():
        # Pip would show every user a note about folders with the names of packages.
        warnings.filterwarnings("ignore", message="Editable installation")
        return str(build_meta.build_editable(wheel_directory, *arguments, **settings))


@contextmanager
def _libraries() -> Iterator[tuple[str, str]]:
    """Put the libraries into the package while a wheel is built; yields the platform tag and the
    system, which is empty for a wheel of any system."""
    shutil.rmtree(STALE, ignore_errors=True)
    try:
        yield _built()
    finally:
        shutil.rmtree(PACKAGED, ignore_errors=True)
        shutil.rmtree(STALE, ignore_errors=True)


def _built() -> tuple[str, str]:
    named = os.environ.get(TARGET_SETTING, "")
    if named:
        target = Target(*named.split("-", 1))
        tag = PLATFORM_TAGS[target.system, target.machine]
        build_all(target, PACKAGED, processors())
        return tag, target.system
    try:
        target = this_target(machine())
        path = find_library(default_cache(), _say).path
        c_library = find_c_library(default_cache(), _say)
    except TierUnavailable as error:
        _say(f"the wheel has no native library: {error}")
        return "any", ""
    PACKAGED.mkdir(exist_ok=True)
    shutil.copyfile(c_library, PACKAGED / c_library_name(target))
    if not path.exists():
        # The cache folder is read-only.
        path = find_library(PACKAGED, _say).path
    for source in (path, path.with_name(library_name(PROCESSOR, target))):
        if source.parent != PACKAGED:
            shutil.copyfile(source, PACKAGED / source.name)
    for lock in PACKAGED.glob("*.lock"):
        lock.unlink()
    return sysconfig.get_platform().replace("-", "_").replace(".", "_"), target.system


@contextmanager
def _tagged(platform: str) -> Iterator[None]:
    """Tag wheels for any Python 3 on ``platform``."""
    own = bdist_wheel.get_tag
    bdist_wheel.get_tag = lambda self: ("py3", "none", platform)
    try:
        yield
    finally:
        bdist_wheel.get_tag = own


@contextmanager
def _without(suffix: str, system: str) -> Iterator[None]:
    """Package data with such a suffix stays out of the wheel, and what the system cannot run."""
    data, modules = build_py.find_data_files, build_py.find_package_modules

    def stays(path: str) -> bool:
        """Whether the wheel has a file."""
        within = Path(path).resolve()
        if path.endswith(suffix) or not within.is_relative_to(ACCEL.parent):
            return not path.endswith(suffix)
        return not (system and is_left_out(within.relative_to(ACCEL.parent), system))

    def find_data_files(self: Any, package: str, src_dir: str) -> list[str]:
        return [name for name in data(self, package, src_dir) if stays(name)]

    def find_package_modules(self: Any, package: str, package_dir: str) -> list[tuple[str, ...]]:
        return [one for one in modules(self, package, package_dir) if stays(one[-1])]

    build_py.find_data_files = find_data_files
    build_py.find_package_modules = find_package_modules
    try:
        yield
    finally:
        build_py.find_data_files = data
        build_py.find_package_modules = modules


def _say(text: str) -> None:
    print(text, file=sys.stderr)
