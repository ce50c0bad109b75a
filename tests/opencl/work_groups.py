"""A tier that takes a processor for an accelerator: the kernels that GPU tiers share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.opencl import tier as tier_module
from accel.opencl.device import Device
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from tests.opencl.conftest import OpenTier


def open_work_groups(
    open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch, **choices: object
) -> OpenClTier:
    """A tier whose ops are launches of work-groups."""
    monkeypatch.setattr(tier_module, "find_device", lambda name: replace(device, is_cpu=False))
    return open_opencl(**choices)


def work_group_tier(device: Device, cache: Path, **choices: Any) -> OpenClTier:
    """The same for fixtures that outlive a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_module, "find_device", lambda name: replace(device, is_cpu=False))
        return OpenClTier(choices=Choices(cache=cache, **choices))
