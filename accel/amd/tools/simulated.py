"""The AMD tiers on a simulated GPU, for developers without a card."""

from accel.amd.kernel import Kernel
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.tier import AmdTier


def simulated_kernel() -> Kernel:
    """A simulated Linux with one gfx1201."""
    return FakeKernel()


def open_simulated(tier: str) -> AmdTier:
    """The tier t1 or t2, whose packets go to a simulation of the GPU in this process."""
    return AmdTier(kernel=simulated_kernel(), tier=tier)
