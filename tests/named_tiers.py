"""Tiers that a test opens by name, and a model that runs on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from contract.tier import Tier
from harness.tiers import open_tier
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.late_tier import LateTier
from tests.needs import need_device

T = TypeVar("T")
OpenTier = Callable[[], Tier]


def open_by_name(name: str) -> Tier:
    """The tier with its default options; a test without the tier's device skips."""
    return need_device(partial(open_tier, name))


def named(*others: str) -> dict[str, OpenTier]:
    """Functions that open the CPU tier, the same with its steps computed late, and ``others``."""
    return {"cpu": CpuTier, "late": LateTier} | {
        name: partial(open_by_name, name) for name in others
    }


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
