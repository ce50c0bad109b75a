"""How devices are named: which can be one tier, by numbers, parts of names or all, and what is said
of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.cuda.device import device_lines
from contract.dtypes import Q8_0
from contract.errors import TierUnavailable
from contract.ir.graph import BufferDecl, BufferKind
from contract.tier import Tier
from harness.cli import findings, inspect_command
from harness.cli.model_facts import RequestedSizes, memory_facts
from harness.tiers import TierOptions
from tests.cuda.fake_devices import FakeDevices
from tests.cuda.test_multi_device import contexts, model_of, opened


def apart() -> FakeDevices:
    driver = FakeDevices()
    driver.apart.add((1, 0))
    return driver


def unequal() -> FakeDevices:
    driver = FakeDevices()
    driver.of_device["COMPUTE_CAPABILITY_MAJOR", 1] = 8
    return driver


@pytest.mark.parametrize(
    ("driver", "device", "match"),
    [
        (FakeDevices(), "0,0", r"device Fake device \(0\) is named twice"),
        (FakeDevices(), "fake,device", r"named twice; name devices by their numbers"),
        (FakeDevices(), "0,5", "no CUDA device matches '5'; there is Fake device .0., Fake"),
        (apart(), "all", r"Fake device \(1\) cannot reach the memory of Fake device \(0\)"),
        (FakeDevices(), "0,", "a device has no name"),
        (apart(), "0,1", r"Fake device \(1\) cannot reach the memory of Fake device \(0\)"),
        (unequal(), "0,1", r"Fake device \(0\) is sm_90a and Fake device \(1\) sm_80"),
    ],
)
def test_what_cannot_be_one_tier_is_said(driver: FakeDevices, device: str, match: str) -> None:
    with pytest.raises(TierUnavailable, match=match):
        opened(driver, device)
    assert contexts(driver) == []


def test_devices_are_listed() -> None:
    """With their numbers, and which of them can be one tier."""
    driver = FakeDevices(3)
    driver.apart |= {(2, 0), (2, 1)}
    driver.of_device["COMPUTE_CAPABILITY_MAJOR", 1] = 7
    assert device_lines(driver) == (
        "0 Fake device: sm_90a, 256 MiB; reaches 1, 2",
        "1 Fake device: sm_70, 256 MiB; too old",
        "2 Fake device: sm_90a, 256 MiB",
    )


def test_check_and_inspect_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the devices open, and that figures are those of each."""

    def open_tier(name: str, options: TierOptions) -> Tier:
        tier: Tier = opened(FakeDevices(), options.device)
        return tier

    monkeypatch.setattr(findings, "open_tier", open_tier)
    found = findings.tier_finding("cuda", "0,1")
    assert (found.ok, found.detail) == (True, "cuda on Fake device (0) + Fake device (1)")
    twice = findings.tier_finding("cuda", "1,1")
    assert (twice.ok, twice.detail) == (False, "cuda: device Fake device (1) is named twice")
    with opened(FakeDevices()) as tier:
        requested = RequestedSizes(32, "i12", 16, 1 << 28, tier=tier)
        facts = memory_facts(model_of("llama", folder), requested, 32)
    assert facts["devices"] == 2
    assert "on cuda, each of 2 devices" in inspect_command._memory(facts)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_devices_can_be_named_at_once(count: int) -> None:
    driver = FakeDevices(count)
    with opened(driver, "all") as tier:
        assert [one.device for one in contexts(driver)] == list(range(count))
        assert tier.info.devices == count


def test_a_number_that_no_device_has_is_no_part_of_a_name() -> None:
    """The digits of a name are one number, as of a model."""
    driver = FakeDevices()
    driver.device_name = b"Fake H200"
    for device in ("2", "0,2", "20"):
        with pytest.raises(TierUnavailable, match=r"no CUDA device matches '(2|20)'; there is"):
            opened(driver, device)
    for device in ("200", "h200", "H2"):
        opened(driver, device).close()


def test_a_device_is_found_by_its_number() -> None:
    driver = FakeDevices()
    with opened(driver, "1") as tier:
        assert [one.device for one in contexts(driver)] == [1]
        weight = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (16, 256), "w")
        tier.free(tier.upload(weight, np.zeros((16, Q8_0.row_bytes(256)), np.uint8)))
