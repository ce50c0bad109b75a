"""The modules of the package are those of the kernels beside them."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from accel.kernels.source import STORED, Module
from accel.kernels.stored import DIGESTS, read_digests
from accel.vulkan import build as build_module
from accel.vulkan.build import (
    FOLDER,
    INSTALL_HINT,
    Build,
    CompileError,
    builds,
    compiled,
    compiler_version,
    kernel_file,
)
from accel.vulkan.declare import BINDINGS, HEADERS, Header, bindings, declarations
from tests.needs import missing

HEADER = Path("/usr/include/vulkan/vulkan_core.h")


def need_compiler() -> str:
    try:
        return compiler_version()
    except (FileNotFoundError, subprocess.SubprocessError):
        missing("glslangValidator is not installed", INSTALL_HINT)


def test_every_module_was_built_from_the_text_of_now():
    """And the package has no other."""
    known = {build.name: build.digest for build in builds()}
    assert read_digests(FOLDER).modules == known, "run python -m accel.vulkan.build"
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {DIGESTS, *(f"{name}.zrt" for name in known)}


@pytest.mark.parametrize(
    "step", [pytest.param(12, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.soak)]
)
def test_building_again_gives_the_same_files(step):
    """Byte for byte with the compiler they were made with; with another one they compile."""
    same = need_compiler() == read_digests(FOLDER).compiler
    for build in list(builds())[::step]:
        made = kernel_file(build, compiled(build))
        assert not same or made == (FOLDER / f"{build.name}.zrt").read_bytes(), build.name


def test_a_changed_text_is_noticed(monkeypatch):
    """Negative control: one more comment."""
    original = build_module.module_source
    monkeypatch.setattr(build_module, "module_source", lambda *a: original(*a) + "// more\n")
    build = Build(Module("add"))
    assert read_digests(FOLDER).modules["add"] != build.digest


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    need_compiler()
    original = build_module.module_source
    monkeypatch.setattr(build_module, "module_source", lambda *a: original(*a) + "nonsense\n")
    with pytest.raises(CompileError, match=r"^rms_norm: [^:]*ERROR: rms_norm.k:20"):
        compiled(replace(Build(Module("add")), module=Module("rms_norm")))


def test_declarations_are_those_of_the_header():
    """Where the machine has the header of the version they were made from."""
    if not HEADER.is_file():
        missing(f"{HEADER} is not there", "apt install libvulkan-dev")
    made = declarations(Header(HEADER.read_text()))
    kept = Path(build_module.__file__).with_name(HEADERS[0]).read_text()
    versions = [text.splitlines()[0] for text in (made, kept)]
    assert made == kept or versions[0] != versions[1]


def test_bindings_are_those_of_the_declarations():
    assert bindings() == Path(build_module.__file__).with_name(BINDINGS).read_text()


def test_products_of_quantized_matrices_have_packed_dots():
    """However a kernel spells them: nothing else would say that they are gone."""
    names = {build.name for build in builds()}
    for dtype in STORED["matmul_row"]:
        assert {f"matmul.{dtype}.dot", f"matmul_row.{dtype}.dot"} <= names
