"""Compiling kernels with NVRTC, for which no device is needed, and keeping cubins on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from accel.cuda.device import find_device
from accel.cuda.driver import Context, Driver
from accel.cuda.program import MAGIC, Builder, Compiler, Modules, Source, plain_source, tuned_source
from accel.kernels.source import Module
from accel.packets.build import BuildError
from accel.packets.disk_cache import write_entry
from contract.dtypes import Q8_0
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nvrtc import FakeNvrtc
from tests.needs import need_installed

SOURCE = Source("one.cu", 'extern "C" __global__ void one(int *x) { x[0] = N; }', (("N", 1),))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    """NVRTC itself."""
    need_installed("cuda.bindings", "cuda")
    return Compiler()


def test_products_are_not_fused_with_sums(compiler: Compiler) -> None:
    """The option is what keeps them apart: without it the code of the self-test is another."""
    source = plain_source(Module("self_test"))
    exact = Builder(compiler, "sm_90a").cubin(source)
    options = ("--std=c++17",)
    assert compiler.compile(source.name, source.text, "sm_90a", options) != exact


def test_errors_name_the_file(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile, and an op without a kernel."""
    broken = Source("broken.cu", "__global__ void f() { nonsense; }")
    with pytest.raises(BuildError, match=r"building broken\.cu failed.*nonsense"):
        Builder(compiler, "sm_80").cubin(broken)
    monkeypatch.setattr("accel.kernels.source._file", lambda name: Path(name).read_text())
    with pytest.raises(BuildError, match=r"add\.k"):
        plain_source(Module("add", Q8_0))


def test_headers_are_included_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned kernel's own headers, of its folder, in the order they are first named."""
    (tmp_path / "kernels").mkdir()
    texts = {"a.cu": '#include "b.h"\n#include "c.h"\nA', "b.h": '#include "c.h"\nB', "c.h": "C"}
    for name, text in texts.items():
        (tmp_path / "kernels" / name).write_text(text)
    monkeypatch.setattr("accel.cuda.program.resources.files", lambda package: tmp_path)
    monkeypatch.setattr("accel.cuda.program.headers", lambda *arguments: "")
    lines = tuned_source("a.cu", {}).text.splitlines()
    assert [line for line in lines if line and not line.startswith("#line")] == ["C", "B", "A"]


def built(cache: Path, **changes: object) -> list[str]:
    """Names of what had to be compiled for a build of SOURCE with ``changes``."""
    nvrtc = FakeNvrtc(changes.pop("version", (13, 0)))  # type: ignore[arg-type]
    architecture = str(changes.pop("architecture", "sm_90a"))
    source = Source(**{"name": "one.cu", "text": SOURCE.text, "macros": SOURCE.macros} | changes)
    Builder(Compiler(nvrtc), architecture, cache).cubin(source)
    return nvrtc.compiled


def test_cubins_are_kept_for_exactly_the_request(tmp_path: Path) -> None:
    """Another text, macro, architecture or compiler is another entry."""
    build = partial(built, tmp_path)
    assert build() == ["one.cu"]
    assert build() == []
    for change in (
        {"text": SOURCE.text + " "},
        {"macros": (("N", 2),)},
        {"architecture": "sm_80"},
        {"version": (13, 1)},
    ):
        assert build(**change) == ["one.cu"], change
        assert build(**change) == [], change


def test_damaged_entries_are_built_anew(tmp_path: Path) -> None:
    """Replaced, and used again."""
    built(tmp_path)
    (entry,) = tmp_path.glob("*.bin")
    good = entry.read_bytes()
    entry.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert built(tmp_path) == ["one.cu"]
    assert entry.read_bytes() == good
    assert built(tmp_path) == []


def test_an_entry_the_driver_refuses_is_replaced(tmp_path: Path) -> None:
    """A whole entry whose machine code is not for this driver."""
    fake, nvrtc = FakeDriver(), FakeNvrtc()
    fake.kernels["one"] = ((8,), lambda *arguments: None)
    driver = Driver(fake)
    builder = Builder(Compiler(nvrtc), "sm_90a", tmp_path)
    loaded = Modules(Context(driver, 0), find_device(driver), builder)
    builder.cubin(SOURCE)
    (entry,) = tmp_path.glob("*.bin")
    good = entry.read_bytes()
    fake.refused_images.add(b"not of this driver")
    write_entry(entry, MAGIC, b"not of this driver")
    assert loaded.function(SOURCE, "one") == "one"
    assert nvrtc.compiled == ["one.cu", "one.cu"]
    assert entry.read_bytes() == good
    with pytest.raises(BuildError, match="it has no kernel two"):
        loaded.function(SOURCE, "two")
