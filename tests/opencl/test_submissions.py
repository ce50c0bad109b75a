"""Memory of the inputs of steps, and what waiting for one teaches of its time."""

from __future__ import annotations

from tests.opencl.conftest import OpenTier
from tests.tiers.chained import LARGEST, LAYOUT, Lowered, step_block


def test_snapshots_are_used_again(open_opencl: OpenTier) -> None:
    """Memory for inputs is as much as steps were under way at once, however many follow."""
    lowered = Lowered(open_opencl())
    tier = lowered.tier
    before = tier.allocated_bytes
    for _ in range(5):
        tier.wait(lowered.submit(step_block(2, seed=1)))
    assert tier.allocated_bytes == before + LAYOUT.nbytes * tier.shares_memory


def test_waiting_again_teaches_nothing_of_a_steps_time(open_opencl: OpenTier) -> None:
    """Else the host would think steps take no time, and ask all the while whether one is done."""
    lowered = Lowered(open_opencl())
    fence = lowered.submit(step_block(LARGEST.tokens, seed=1))
    lowered.tier.wait(fence)
    fence.batch.pace.seconds = 1.0
    lowered.tier.wait(fence)
    assert fence.batch.pace.seconds == 1.0
