"""A tier that takes a processor for an accelerator: the kernels that GPU tiers share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel.opencl import tier as tier_module
from accel.opencl.device import Device
from accel.opencl.tier import OpenClTier
from tests.opencl.conftest import OpenTier


def open_work_groups(
    open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch, **choices: object
) -> OpenClTier:
    """A tier whose ops are launches of work-groups."""
    monkeypatch.setattr(tier_module, "find_device", lambda name: replace(device, is_cpu=False))
    return open_opencl(**choices)
