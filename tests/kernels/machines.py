"""Devices that a processor plays, with the kernels that GPU tiers share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accel.amd.runtime import Choices as AmdChoices
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import PROPERTIES, Behaviour
from accel.amd.tier import AmdTier
from accel.kernels.source import Traits
from accel.metal.runtime import Choices as MetalChoices
from accel.metal.tier import MetalTier
from contract.tier import Tier
from tests.intel.simulated import intel_tier
from tests.kernels.processor import cpu_device
from tests.metal.conftest import new_mac
from tests.opencl.work_groups import work_group_tier

GFX1100 = {
    "properties": PROPERTIES | {"gfx_target_version": 110000, "simd_count": 192},
    "discovery": 11 << 16,
}


def gfx1100(**behaviour: Any) -> FakeKernel:
    """A system with a GPU of the generation before; it checks what launches read."""
    return FakeKernel(Behaviour(**{**GFX1100, "checked": True, **behaviour}))


@contextmanager
def _work_groups(cache: Path, **choices: bool) -> Iterator[Tier]:
    with work_group_tier(cpu_device(), cache, **{"shared_addresses": True, **choices}) as tier:
        yield tier


@contextmanager
def _metal(cache: Path, math_mode: bool = True, **choices: Any) -> Iterator[Tier]:
    mac = new_mac(cache, math_mode=math_mode)
    with MetalTier(choices=MetalChoices(**choices), metal=mac.metal) as tier:
        yield tier
    assert (mac.problems, mac.leaked) == ([], [])


def _intel(cache: Path, **choices: Any) -> AbstractContextManager[Tier]:
    # The self-test has its own test, and takes as long as ten of these.
    return intel_tier(cache, **{"traits": Traits(), **choices})


@contextmanager
def _amd(
    cache: Path, behaviour: dict[str, Any], driver: str = "t1", **choices: Any
) -> Iterator[Tier]:
    kernel = FakeKernel(Behaviour(**behaviour, checked=True))
    with AmdTier(choices=AmdChoices(**choices), kernel=kernel, tier=driver) as tier:
        yield tier
    assert kernel.leaked == []


MACHINES: dict[str, Callable[..., AbstractContextManager[Tier]]] = {
    "work-groups": _work_groups,
    "metal-simulated": _metal,
    "intel-simulated": _intel,
    "gfx1201": partial(_amd, behaviour={}, native=True, matrices=True),
    "gfx1100": partial(_amd, behaviour=GFX1100, native=True),
}
"""``MACHINES[name](cache, **choices)`` opens a tier and closes it; nothing may be left over."""
