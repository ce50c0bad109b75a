"""Another compiler's Metal text of the same kernels, from SPIR-V: both ask Metal for the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from accel.kernels.source import Language, Module, module_source, modules
from accel.vulkan.build import file_name
from accel.vulkan.program import kernel_of
from tests.needs import missing

BUILT_IN = re.compile(r"\[\[(thread\w+|threads\w+)\]\]")
BARRIER = "threadgroup_barrier("


def crossed(module: Module, folder: Path) -> str:
    """The text that spirv-cross makes of the stored module of Vulkan."""
    program = shutil.which("spirv-cross") or missing(
        "spirv-cross is not installed", "apt-get install spirv-cross"
    )
    binary = folder / f"{module}.spv"
    binary.write_bytes(kernel_of(file_name(module)).code)
    command = [program, "--msl", "--msl-version", "30000", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", modules(), ids=str)
def test_both_texts_ask_for_the_same(module: Module, tmp_path: Path) -> None:
    """The kernel's built-in arguments, the group's items, and whether items wait for each other."""
    theirs, ours = crossed(module, tmp_path), module_source(Language.METAL, module)
    kernel = theirs[theirs.index("kernel void") :]
    assert set(BUILT_IN.findall(kernel)) <= set(BUILT_IN.findall(ours))
    size = re.search(r"gl_WorkGroupSize \S+ = uint3\((\d+)u, 1u, 1u\)", theirs)
    if size is not None:
        assert int(size[1]) == module.group_size
    assert "buffer(0)" in kernel
    assert "buffer(1)" not in kernel
    assert (BARRIER in theirs) == (BARRIER in body(ours))


def body(text: str) -> str:
    """What a text's kernel and the functions it reaches say, macros replaced."""
    compiler = shutil.which("g++") or missing("g++ is not installed", "apt-get install g++")
    command = [compiler, "-E", "-P", "-x", "c++", "-"]
    source = text.replace("#include <metal_stdlib>", "")
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return done.stdout
