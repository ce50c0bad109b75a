"""The Metal tier on a simulated Mac, for developers without one."""

from accel.metal.sim.fake_metal import FakeMetal
from accel.metal.tier import MetalTier


def open_simulated() -> MetalTier:
    """A tier whose messages go to a simulation of Metal in this process. Raises TierUnavailable
    if there is no compiler for its kernels."""
    return MetalTier(metal=FakeMetal().metal)
