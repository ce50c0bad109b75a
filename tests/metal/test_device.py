"""Finding a device: what is missing, in words, and nothing left of what was refused."""

import importlib
import re
import sys
from typing import Any

import pytest

from accel.metal import objc, program
from accel.metal.device import NEWER_HINT, NO_DEVICE
from accel.metal.objc import NO_METAL, load_metal
from accel.metal.runtime import Choices
from accel.metal.signatures import SIGNATURES
from accel.metal.sim.fake_compiler import NO_COMPILER
from accel.metal.sim.fake_compiler import _compiler as find_compiler
from accel.metal.sim.fake_machine import APPLE_M1
from accel.metal.sim.fake_metal import FakeMetal
from accel.metal.tier import MetalTier, device_lines
from contract.errors import TierUnavailable
from harness.tiers import SIMULATED, TierOptions, open_tier

LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "no device": ({"present": False}, NO_DEVICE),
    "Intel": ({"families": frozenset((2002, 5001)), "unified": False},
              "lacks GPU family Apple7, memory it shares with the host"),
    "old system": ({"families": APPLE_M1 - {5001}}, "lacks GPU family Metal3"),
    "small groups": ({"group_memory_bytes": 8 << 10}, "lacks 16384 bytes of group memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKS)
def test_what_is_missing(make_mac, case):
    """One line that names it, and the device is given back."""
    behaviour, reason = LACKS[case]
    mac = make_mac(**behaviour)
    with pytest.raises(TierUnavailable, match=reason) as caught:
        MetalTier(metal=mac.metal)
    assert caught.value.remedy
    assert (mac.problems, mac.leaked) == ([], [])


def test_a_pipeline_that_takes_smaller_groups(make_mac):
    """Kernels are right in groups of their own size alone."""
    mac = make_mac(pipeline_items=64)
    with pytest.raises(TierUnavailable, match="groups of self_test have 128 items, it takes 64"):
        MetalTier(metal=mac.metal)
    assert (mac.problems, mac.leaked) == ([], [])


def test_another_name_than_the_devices(make_mac):
    mac = make_mac()
    with pytest.raises(TierUnavailable, match="no Metal device matches 'm4'; there is Apple M1"):
        MetalTier("m4", metal=mac.metal)
    with MetalTier("m1", metal=mac.metal) as tier:
        assert tier.info.device == "Apple M1 (simulated)"
    assert mac.leaked == []


def test_a_machine_without_metal_says_so(monkeypatch):
    """Opened by name, and nothing but a name is simulated."""
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(TierUnavailable, match=NO_METAL) as caught:
        open_tier("metal")
    assert "--device simulated" in caught.value.remedy


def test_a_framework_that_does_not_load(monkeypatch):
    # Ubuntu's Python has not the part of ctypes that this module needs on macOS.
    importlib.import_module("ctypes.util")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(objc, "RUNTIME", "/nowhere/libobjc.A.dylib")
    with pytest.raises(TierUnavailable, match=f"{NO_METAL} .*libobjc"):
        load_metal()


def test_cffi_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "cffi", None)
    with pytest.raises(TierUnavailable, match=r"pip install '(zinc-rt|\.)\[metal\]'"):
        FakeMetal()


def test_the_simulated_device_needs_a_compiler(monkeypatch, tmp_path):
    find_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(TierUnavailable, match=re.escape(NO_COMPILER)):
            FakeMetal(cache=tmp_path)
    finally:
        find_compiler.cache_clear()


def test_simulated_is_a_device_one_can_name():
    """What it is called says so wherever it is shown."""
    with open_tier("metal", TierOptions(device=SIMULATED)) as tier:
        assert tier.info.device.endswith("(simulated)")


def test_lines_about_devices(make_mac):
    """System, memory, kernels, or what is missing."""
    mac = make_mac()
    assert device_lines(mac.metal) == (
        "Apple M1 (simulated): Metal, simulated, 4,096 MiB shared; kernels: products without "
        "packed dot products, nothing in integers",
    )
    old = make_mac(families=APPLE_M1 - {5001})
    (line,) = device_lines(old.metal)
    assert line.endswith("; lacks GPU family Metal3")
    assert (mac.leaked, old.leaked) == ([], [])


def test_fast_mathematics_are_found_out(make_mac, monkeypatch):
    """A compiler that regroups sums is refused by what it computes, on old and new systems."""
    monkeypatch.setattr(program, "SAFE", 2)
    mac = make_mac()
    with pytest.raises(TierUnavailable, match=r"does not compute exactly: .*regrouping"):
        MetalTier(metal=mac.metal)
    assert (mac.problems, mac.leaked) == ([], [])


def test_methods_are_checked_before_they_are_called(make_mac, monkeypatch):
    """Other types than the known ones are an error with both, and no call."""
    wrong = dict(SIGNATURES) | {"maxBufferLength": ("void", "uint64_t")}
    monkeypatch.setattr("accel.metal.signatures.SIGNATURES", wrong)
    mac = make_mac()
    with pytest.raises(TierUnavailable, match="maxBufferLength: its types here are Q@:") as caught:
        MetalTier(metal=mac.metal)
    assert caught.value.remedy == NEWER_HINT
    assert mac.leaked == []


def test_memory_can_be_limited(make_mac):
    """Too little to open is an error of opening."""
    mac = make_mac()
    with pytest.raises(TierUnavailable, match=r"cannot be used \(out of memory for self-test"):
        MetalTier(choices=Choices(memory_bytes=1000), metal=mac.metal)
    assert (mac.problems, mac.leaked) == ([], [])
