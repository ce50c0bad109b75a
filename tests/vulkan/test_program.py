"""Pipelines kept on disk, and what becomes of entries that are damaged or foreign."""

from dataclasses import replace
from pathlib import Path

import pytest

from accel.packets.disk_cache import read_entry, write_entry
from accel.vulkan.device import CacheKey, Instance
from accel.vulkan.program import CACHE_HEADER, MAGIC, cache_file, fitting_cache
from tests.doubling import run_doubling
from tests.vulkan.conftest import OpenTier

KEY = CacheKey(7, 8, bytes(range(16)), 9)
HEADER = CACHE_HEADER.pack(32, 1, 7, 8, bytes(range(16)))


def entry_of(open_vulkan: OpenTier, folder: Path) -> Path:
    """The file a tier has written."""
    run_doubling(open_vulkan(cache=folder))
    (entry,) = folder.glob("*.pipelines")
    return entry


def test_pipelines_are_kept(open_vulkan, tmp_path):
    """A valid entry whose header is this driver's; a second start leaves it as it is."""
    entry = entry_of(open_vulkan, tmp_path)
    data = read_entry(entry, MAGIC)
    assert data is not None
    tier = open_vulkan(cache=tmp_path)
    assert fitting_cache(data, tier.device.cache_key) == data
    run_doubling(tier)
    assert read_entry(entry, MAGIC) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: b"zinc-rt vulkan pipelines 0\n" + data[len(MAGIC) :],
    ],
    ids=["empty", "truncated", "one-bit", "another-version"],
)
def test_a_damaged_entry_is_replaced(open_vulkan, tmp_path, damage):
    entry = entry_of(open_vulkan, tmp_path)
    entry.write_bytes(damage(entry.read_bytes()))
    assert read_entry(entry, MAGIC) is None
    assert entry_of(open_vulkan, tmp_path) == entry
    assert read_entry(entry, MAGIC) is not None


def test_a_whole_entry_of_another_driver_is_not_used(open_vulkan, tmp_path):
    """Well-formed for us, but not what the driver wrote."""
    entry = entry_of(open_vulkan, tmp_path)
    write_entry(entry, MAGIC, HEADER + b"pipelines of another driver")
    entry_of(open_vulkan, tmp_path)
    assert b"another driver" not in entry.read_bytes()


def test_only_a_fitting_header_reaches_the_driver():
    assert fitting_cache(HEADER + b"rest", KEY) == HEADER + b"rest"
    assert fitting_cache(None, KEY) == fitting_cache(HEADER[:-1], KEY) == b""
    for key in (replace(KEY, vendor=1), replace(KEY, device=1), replace(KEY, uuid=bytes(16))):
        assert fitting_cache(HEADER, key) == b""
    assert fitting_cache(CACHE_HEADER.pack(32, 2, 7, 8, KEY.uuid), KEY) == b""


def test_every_device_and_driver_has_its_own_file(vulkan, tmp_path):
    with Instance(vulkan) as instance:
        device = instance.device()
    newer = replace(device, cache_key=replace(device.cache_key, driver=1 << 30))
    other = replace(device, cache_key=replace(device.cache_key, uuid=b"another device.."))
    assert len({cache_file(tmp_path, found) for found in (device, newer, other)}) == 3


def test_an_unwritable_cache_only_costs_time(open_vulkan, tmp_path):
    """A cache that is a file is no folder."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    run_doubling(open_vulkan(cache=blocked))
