"""The kernels compiled for 64-bit ARM: how they are compiled, and their bits in emulation."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from accel.native.compile import FLAGS, build_library, build_processor_library, find_compiler
from accel.native.library import VARIANT_SETTING, _store
from accel.native.names import PROCESSOR, Target, library_name
from accel.native.sources import FOLDER
from accel.native.variants import VARIANTS
from harness.conformance.must_pass import must_pass_ids
from harness.conformance.package import unpack
from tests.needs import machine_lacks, need_device
from tests.paths import ROOT

ROOT_SETTING = "ZINC_RT_AARCH64"
"""Environment variable: the folder that ``ci/aarch64`` has filled with a Python for ARM."""
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
PROCESSORS = {"aarch64-dotprod": "max", "aarch64-neon": "cortex-a53"}
"""A processor of the emulator that each variant is the fastest for."""
TARGET = Target("linux", "aarch64")
SELECTED = 40
"""One in this many conformance cases of an opcode: one takes a tenth of a second in emulation."""
SECONDS = 3600
"""A busy machine may take ten times the usual minutes."""
SIGNED = "-fsigned-char"


def _compiled(flags: list[str], target: Target, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile the header of all units alone for a target."""
    command = need_device(find_compiler).compile_command(target, [])
    command = [flag for flag in command if flag not in FLAGS]
    (folder / "unit.c").write_text((FOLDER / "opencl_c.h").read_text(encoding="utf-8"))
    return subprocess.run(
        [*command, *flags, "unit.c", "-o", "unit.o"],
        cwd=folder,
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": "zig", "ZIG_LOCAL_CACHE_DIR": "zig"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
@pytest.mark.parametrize("system", ["linux", "macos", "windows"])
def test_char_is_signed_on_every_target(system, machine, tmp_path):
    """C leaves it to the target; the kernels are OpenCL C, where it is signed."""
    done = _compiled(list(FLAGS), Target(system, machine), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_compiler_with_unsigned_char_is_refused(tmp_path):
    """Without the flag, Linux on ARM would read negative integers of weights and keys wrong."""
    flags = [flag for flag in FLAGS if flag != SIGNED]
    done = _compiled(flags, TARGET, tmp_path)
    assert done.returncode != 0
    assert "OpenCL's char is signed" in done.stderr


def _emulated(processor: str, cache: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a Python for ARM on an emulated processor."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    root = Path(os.environ.get(ROOT_SETTING, ""))
    if emulator is None or not os.environ.get(ROOT_SETTING):
        machine_lacks(f"emulated ARM: install qemu-user-static, run ci/aarch64, set {ROOT_SETTING}")
    python = root / "root" / "usr" / "bin" / "python3.11"
    paths = (ROOT, root / "site")
    environment = {name: value for name, value in os.environ.items() if name != VARIANT_SETTING}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return [emulator, "-cpu", processor, "-L", str(root / "root"), str(python)], environment


def _selected() -> list[str]:
    """Some cases of every group: an opcode, the tier, whole models, stored logits."""
    groups: dict[str, list[str]] = {}
    for case in must_pass_ids():
        groups.setdefault(case.partition("-")[0], []).append(case)
    return [case for cases in groups.values() for case in cases[::SELECTED]]


@pytest.mark.long
@pytest.mark.timeout(SECONDS)
@pytest.mark.parity
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_variant_for_arm_computes_the_same_bits(name, tmp_path):
    """Conformance cases of every opcode, whole models and stored logits, all of it in emulation:
    Python, numpy, the definitions and the native tier, which chooses the variant itself."""
    command, environment = _emulated(PROCESSORS[name], tmp_path)
    compiler = need_device(find_compiler)
    folder = tmp_path / "zinc-rt" / "native"
    folder.mkdir(parents=True)
    variant = next(variant for variant in VARIANTS if variant.name == name)
    jobs = os.cpu_count() or 1
    libraries = {
        PROCESSOR: build_processor_library(TARGET, compiler),
        name: build_library(variant, TARGET, compiler, jobs),
    }
    for file, data in libraries.items():
        assert _store(folder / library_name(file, TARGET), data)
    cases = _selected()
    (tmp_path / "cases.txt").write_text("\n".join(cases))
    arguments = ["--tier", "native", "--threads", "2", "--must-pass", str(tmp_path / "cases.txt")]
    package = tmp_path / "package.tar.gz"
    done = subprocess.run(
        [*command, "-m", "harness.conformance", *arguments, "--out", str(package)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(unpack(package)["run.json"])
    assert run["counts"] == {"pass": len(cases), "fail": 0, "waived": 0}
    assert run["machine"]["system"] == "Linux aarch64"
    assert run["tier"]["driver"] == name
