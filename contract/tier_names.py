"""The names of the tiers. What only parses a command line reads them, without numpy."""

from __future__ import annotations

TIER_NAMES = ("cpu", "native", "opencl", "vulkan", "cuda", "metal", "t1", "t2", "intel")
