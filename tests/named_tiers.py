"""Tiers that a test opens by name, and a model that runs on one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from accel.native.tier import Choices, NativeTier
from contract.errors import TierUnavailable
from contract.tier import Tier, TierInfo
from harness import tiers
from harness.tiers import open_tier
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.late_tier import LateTier
from tests.needs import need_device
from tests.steps_of_process import StepsOfProcess

T = TypeVar("T")
OpenTier = Callable[[], Tier]


def open_by_name(name: str) -> Tier:
    """The tier with its default options; a test without the tier's device skips."""
    return need_device(partial(open_tier, name))


class QuickTier(NativeTier):
    """The native tier with one thread; its steps are to be waited for, as those of the CPU tier."""

    def __init__(self, name: str) -> None:
        super().__init__(choices=Choices(threads=1, cache=tiers.kernel_cache("native")))
        self._stored_steps = StepsOfProcess(Path(), self.workers)
        self._name = name

    @property
    def info(self) -> TierInfo:
        """As the native tier's, but for the queue and the name."""
        return replace(super().info, asynchronous=False, name=self._name)


def quick_tier(name: str = "native") -> Tier:
    """A tier for tests of what the host does around steps: it has the bits of the CPU tier in a
    tenth of its time. Where no library can be compiled it is the CPU tier."""
    try:
        return QuickTier(name)
    except TierUnavailable:
        return CpuTier()


def named(*others: str) -> dict[str, OpenTier]:
    """Functions that open the CPU tier, one whose steps are computed late, and ``others``."""
    return {"cpu": CpuTier, "late": LateTier} | _by_name(others)


def around_steps(*others: str) -> dict[str, OpenTier]:
    """``named`` for tests of what the host does around steps: a quick tier is the first."""
    return {"quick": quick_tier, "late": LateTier} | _by_name(others)


def _by_name(names: Iterable[str]) -> dict[str, OpenTier]:
    return {name: partial(open_by_name, name) for name in names}


def on_each(tiers: Iterable[str], names: Iterable[T], *emulated: T) -> list[tuple[str, T]]:
    """Every tier with every name; of Vulkan, which a processor plays slowly, those in ``emulated``
    alone. Tests of one tier follow each other."""
    known = list(names)
    assert set(emulated) <= set(known)
    return [(tier, name) for tier in tiers for name in (emulated if tier == "vulkan" else known)]


@contextmanager
def runner_on(path: Path, opening: OpenTier, limits: Limits) -> Iterator[ModelRunner]:
    """A model's runner on a tier; all three are closed at the end."""
    model = open_model(path)
    with model.file, opening() as tier, ModelRunner(model, tier, limits) as runner:
        yield runner


def is_emulated(tier: Tier) -> bool:
    """Whether a processor plays a graphics card, whose steps take twenty times as long."""
    return tier.info.name == "vulkan" and tier.info.host_unified
