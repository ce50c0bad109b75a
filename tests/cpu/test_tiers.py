"""Opening tiers by name: what this build has, what it lacks, and how it says so."""

from typing import get_args

import pytest

from contract.errors import TierUnavailable
from contract.tier_names import TIER_NAMES
from harness import settings_table, tiers
from harness.tiers import AUTO, TIERS, TierOptions, open_tier, probe
from zinc_rt.arguments import TierName


@pytest.mark.parametrize("name", [AUTO, "cpu"])
def test_cpu_always_opens(name):
    """By name and as the best there is on a machine without a device."""
    with open_tier(name, TierOptions(threads=1)) as tier:
        assert tier.info.name in TIERS


def test_every_tier_of_the_design_is_built():
    """None of the names that programs list is empty, and options take each."""
    assert set(TIERS) == set(TIER_NAMES)
    assert settings_table.TIERS == get_args(TierName) == (AUTO, *TIER_NAMES)


def test_unknown_name():
    """A misspelt tier lists the names there are."""
    with pytest.raises(TierUnavailable, match="choose one of auto, cpu"):
        open_tier("gpu")


def test_probe_reports_every_tier_of_the_design():
    """One status each, in order; an unavailable one says why and what to do."""
    statuses = probe()
    assert tuple(status.name for status in statuses) == TIER_NAMES
    for status in statuses:
        assert status.available == bool(status.device)
        assert status.available != bool(status.reason and status.remedy)
    opened = {status.name for status in statuses if status.available}
    assert "cpu" in opened


DIES = """
import os
from harness import tiers
tiers.open_tier = lambda name: print("no linker", flush=True) or os._exit(6)
"""


def test_a_driver_that_ends_the_process_is_a_status(monkeypatch):
    """The tiers after it are still found."""
    monkeypatch.setattr(tiers, "TIER_NAMES", ("cpu", "opencl", "intel"))
    monkeypatch.setattr(
        tiers, "PROBE", tiers.PROBE.replace("print_statuses(sys", DIES + "print_statuses(sys")
    )
    cpu, opencl, intel = tiers.probe()
    assert cpu.available
    assert opencl.reason == "its driver ends the process (status 6): no linker"
    assert intel.reason
