"""The real loader of Level Zero and its validation layer between the tier and the simulated driver,
on machines that have them (Debian's libze1 and libze-dev)."""

import os
import subprocess
import sys

import pytest

from accel.native.compile import find_compiler
from tests.intel.simulated import PREFIX, Builder
from tests.needs import machine_lacks
from tests.patience import PROCESS_SECONDS

INCLUDE, LIBRARIES = PREFIX / "include", PREFIX / "lib" / "x86_64-linux-gnu"
PROGRAM = """
import sys
from pathlib import Path
from accel.intel.runtime import Choices
from accel.intel.tier import IntelTier
from tests.doubling import run_doubling
from tests.intel.conftest import NATIVE
from tests.intel.simulated import Simulated
cache, driver = map(Path, sys.argv[1:])
gpu = Simulated(cache, driver)
with IntelTier(choices=Choices(traits=NATIVE, cache=cache / "intel"), zero=gpu.zero) as tier:
    run_doubling(tier, 3)
    print(tier.info.device)
print(gpu.problems, gpu.leaked)
print(hex(gpu.zero.library.zeCommandListClose(gpu.zero.ffi.NULL)), gpu.problems)
"""


@pytest.mark.parametrize("validated", [False, True], ids=["loader", "validation-layer"])
def test_the_real_loader(make_gpu, kernel_cache, tmp_path, validated):
    """Whatever the tier calls passes; a null handle reaches the driver, or is refused before."""
    make_gpu()
    if not (LIBRARIES / "libze_loader.so.1").exists() or not (INCLUDE / "level_zero").exists():
        machine_lacks("Level Zero loader with headers (apt install libze1 libze-dev)")
    builder = Builder(kernel_cache / "intel", find_compiler())
    driver = builder.driver(INCLUDE, tmp_path / "libze_simulated.so.1")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "ZE_ENABLE_ALT_DRIVERS": str(driver),
        **{
            f"ZE_ENABLE_{layer}": str(int(validated))
            for layer in ("VALIDATION_LAYER", "PARAMETER_VALIDATION")
        },
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(kernel_cache), str(driver)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PROCESS_SECONDS,
    )
    noticed = "[]" if validated else "['zeCommandListClose: a handle is null']"
    assert done.stdout.splitlines() == ["Intel GPU (simulated)", "[] 0", f"0x78000005 {noticed}"]
