"""Types of Metal's methods; Metal texts as C++: errors, barriers that all items meet, faults."""

import shutil

import numpy as np
import pytest

from accel.kernels.source import Language, Module, module_source
from accel.metal.objc import ObjectiveC
from accel.metal.signatures import SIGNATURES, declared_kinds, kinds_of
from accel.metal.sim import fake_compiler
from accel.metal.sim.fake_compiler import HEADER, SHIM, CompileError, FakeCompiler
from accel.packets.packet import PACKET
from tests.doubling import run_doubling
from tests.kernels.metal_modules import compiled
from tests.needs import need_device

SELF_TEST = module_source(Language.METAL, Module("self_test"))
ONE = "OPEN;"


def test_an_error_is_found_where_it_is(kernel_cache):
    """The compiler names the kernel's file and line."""
    text = module_source(Language.METAL, Module("add")).replace("A(a) + A(b)", "A(a) +")
    with pytest.raises(CompileError, match=r"add\.k:6"):
        compiled(Module("add"), text, kernel_cache)


@pytest.mark.parametrize(
    "condition", ["ITEM > 5u", "ITEM == 0u", "ITEM != 0u", "GROUP == 1u && ITEM > 9u"]
)
def test_a_barrier_that_some_pass_by_is_noticed(kernel_cache, condition):
    """Whichever items they are."""
    text = SELF_TEST.replace(ONE, f"if ({condition}) GROUP_BARRIER; {ONE}")
    run = compiled(Module("self_test"), text, kernel_cache)
    assert not run(np.zeros(1, PACKET).ctypes.data, 2)


@pytest.mark.parametrize("condition", ["true", "GROUP == 1u"])
def test_a_barrier_that_all_meet_is_none(kernel_cache, condition):
    """In all groups, or in one of them."""
    text = SELF_TEST.replace(ONE, f"if ({condition}) {{ GROUP_BARRIER; GROUP_BARRIER; }} {ONE}")
    run = compiled(Module("self_test"), text, kernel_cache)
    assert run(np.zeros(1, PACKET).ctypes.data, 2)


def test_headers_are_kept_until_they_change(tmp_path, monkeypatch):
    """As the compiler read them once, for kernels with the same options."""
    shim, cache = tmp_path / "shim", tmp_path / "cache"
    shutil.copytree(SHIM, shim)
    monkeypatch.setattr(fake_compiler, "SHIM", shim)
    compiler = FakeCompiler(cache)
    first = need_device(lambda: compiler.kernel(SELF_TEST, fast=False))
    assert compiler.kernel(SELF_TEST, fast=False) == first
    assert len(list(cache.glob(f"*/{HEADER}.gch"))) == 1
    header = shim / HEADER
    header.write_text(header.read_text() + '\n#error "another header"\n')
    with pytest.raises(CompileError, match="another header"):
        compiler.kernel(SELF_TEST, fast=False)
    assert len(list(cache.iterdir())) == 2


ENCODINGS = {
    "@32@0:8Q16Q24": "newBufferWithLength:options:",
    "@48@0:8^v16Q24Q32@?40": "newBufferWithBytesNoCopy:length:options:deallocator:",
    "@40@0:8@16@24^@32": "newLibraryWithSource:options:error:",
    "@48@0:8@16Q24o^@32o^@40": ("newComputePipelineStateWithDescriptor:options:reflection:error:"),
    "v64@0:8{?=QQQ}16{?=QQQ}40": "dispatchThreadgroups:threadsPerThreadgroup:",
    "v40@0:8@16{_NSRange=QQ}24": "executeCommandsInBuffer:withRange:",
    "v40@0:8r^@16Q24Q32": "useResources:count:usage:", "B24@0:8q16": "supportsFamily:",
    "c32@0:8Q16Q24": "waitUntilSignaledValue:timeoutMS:", "r*16@0:8": "UTF8String",
    "@24@0:8r*16": "stringWithUTF8String:", "v20@0:8B16": "setFastMathEnabled:",
    "Vv16@0:8": "commit", "^v16@0:8": "contents",
}  # fmt: skip
"""As runtimes of 64 bits write them, with the offsets of arguments; qualifiers and the kind of BOOL
differ between systems."""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_are_understood(encoding):
    assert kinds_of(encoding) == declared_kinds(ENCODINGS[encoding])


@pytest.mark.parametrize(
    ("encoding", "selector"),
    [
        ("@32@0:8Q16I24", "newBufferWithLength:options:"),
        ("@24@0:8Q16", "newBufferWithLength:options:"),
        ("v40@0:8{?=II}16@24@32", "dispatchThreadgroups:threadsPerThreadgroup:"),
        ("d16@0:8", "maxBufferLength"),
        ("", "commit"),
    ],
)
def test_other_types_are_told_apart(encoding, selector):
    assert kinds_of(encoding) != declared_kinds(selector)


def test_every_message_is_checked_before_it_is_sent(open_metal, mac, monkeypatch):
    """Whatever a tier sends, opened and used, but for the few that objects of any system know."""
    sent: set[str] = set()
    message = ObjectiveC._message

    def noted(self: ObjectiveC, selector: str) -> object:
        sent.add(selector)
        return message(self, selector)

    monkeypatch.setattr(ObjectiveC, "_message", noted)
    run_doubling(open_metal())
    checked = {selector for _, selector in mac.metal._checked}
    everywhere = {"new", "stringWithUTF8String:", "UTF8String", "respondsToSelector:"}
    assert sent - checked <= everywhere
    assert sent <= set(SIGNATURES)
