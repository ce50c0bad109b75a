"""What every tier says of itself, how it ends, and what it is when its device is lost."""

import gc
import weakref
from typing import Any

import pytest

from accel.packets.rules import OPCODES
from contract.errors import DeviceLost
from contract.opcodes import Opcode
from contract.tier_names import TIER_NAMES
from tests.doubling import STATE, Doubling, inputs_of, run_doubling, values_of
from tests.tiers.conftest import each
from tests.tiers.ways import DEVICES

devices = pytest.mark.parametrize("way", each(*DEVICES), indirect=True, scope="module")


def test_a_tier_says_what_it_is_and_is_closed_twice(open_way):
    """What a conformance package records. It is closed with a step in flight."""
    tier = open_way()
    info = tier.info
    assert info.name in TIER_NAMES
    assert info.device
    assert info.opcodes == OPCODES == frozenset(Opcode)
    assert info.arithmetic == "exact-2"
    lowered = Doubling(tier)
    lowered.run(2)
    tier.submit(lowered.batch, inputs_of(values_of(0)), ("y",))
    tier.close()
    tier.close()


@pytest.mark.parametrize(
    "way",
    each(*(name for name in DEVICES if not name.startswith("amd"))),
    indirect=True,
    scope="module",
)
def test_a_closed_tier_goes_with_its_last_reference(way, kernel_cache):
    """Its programs and tables wait for no garbage collection; on AMD, steps refer to the tier."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with way.opening(kernel_cache) as opening:
            tier = opening()
            run_doubling(tier)
            tier.close()
            watched = weakref.ref(tier)
            del tier
            assert watched() is None
    finally:
        if enabled:
            gc.enable()


@devices
def test_a_step_that_does_not_end_in_time_loses_the_device(open_way, monkeypatch):
    """The deadline is the caller's. Whatever is asked of the tier from then on, it says that its
    device is lost; it gives everything back, and another tier opens."""
    tier: Any = open_way()
    lowered = Doubling(tier)
    lowered.run(2)
    fence = tier.submit(lowered.batch, inputs_of(values_of(0)))
    tier._finish()
    monkeypatch.setattr(tier, "_until_done", lambda fence, seconds: False)
    with pytest.raises(DeviceLost, match=r"did not end within 0.25 s") as caught:
        tier.wait(fence, 0.25)
    assert str(caught.value).startswith(tier.info.device)
    for asked in (
        lambda: tier.submit(lowered.batch, inputs_of(values_of(0))),
        *(lambda: tier.wait(fence), lambda: tier.alloc(STATE, 64), lambda: tier.map(lowered.y)),
        lambda: tier.read(lowered.y, 0, 4),
    ):
        with pytest.raises(DeviceLost, match="did not end within"):
            asked()
    tier.free(lowered.y)
    tier.close()
    another = open_way()
    run_doubling(another)
    another.close()
