"""What a test needs beside the project: data and programs, or a kind of machine.

Nothing else in the tests skips, so that a proof cannot go missing unseen."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TypeVar

import pytest

from accel.amd.device import NO_GPU
from accel.amd.kfd import NO_AMDKFD
from accel.amd.userq import NO_RENDER_NODE
from accel.cuda.driver import NO_CUDA_DEVICE, NO_DRIVER
from accel.intel.api import NO_LOADER
from accel.intel.device import NO_DEVICE as NO_INTEL_DEVICE
from accel.intel.device import NO_DRIVER as NO_INTEL_DRIVER
from accel.metal.device import NO_DEVICE
from accel.metal.objc import NO_METAL
from contract.errors import TierUnavailable

T = TypeVar("T")


def missing(what: str, remedy: str) -> NoReturn:
    """Skip for want of ``what``, which ``remedy`` would mend; where CI is set, fail."""
    reason = f"{what}; {remedy}"
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (CI is set: nothing may be missing)", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def machine_lacks(what: str) -> NoReturn:
    """Skip for want of something that no installation brings: a device, a system, a processor."""
    pytest.skip(f"this machine has no {what}", allow_module_level=True)


def need_file(path: Path) -> Path:
    """``path``, a file of the shared test data."""
    if not path.exists():
        missing(
            f"{path} does not exist",
            "put the test data into ../shared or name its folder in ZINC_RT_TEST_DATA",
        )
    return path


def need_device(open_it: Callable[[], T]) -> T:
    """What ``open_it`` gives: a tier, or a device of one."""
    try:
        return open_it()
    except TierUnavailable as error:
        if error.reason in (NO_DRIVER, NO_CUDA_DEVICE):
            machine_lacks("CUDA device")
        if error.reason in (NO_AMDKFD, NO_RENDER_NODE, NO_GPU):
            machine_lacks("AMD GPU")
        if error.reason in (NO_METAL, NO_DEVICE):
            machine_lacks("Metal device")
        if error.reason in (NO_LOADER, NO_INTEL_DRIVER, NO_INTEL_DEVICE):
            machine_lacks("Intel GPU")
        missing(error.reason, error.remedy)


def need_installed(module: str, extra: str) -> None:
    """Ask for a module of one of the project's extras, without importing it."""
    if importlib.util.find_spec(module) is None:
        missing(f"{module} is not installed", f"pip install 'zinc-rt[{extra}]'")


def need_module(module: str, extra: str) -> ModuleType:
    """The imported module of one of the project's extras."""
    need_installed(module, extra)
    return importlib.import_module(module)
