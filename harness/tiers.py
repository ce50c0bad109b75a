"""The tiers of this build: opening one by name, and saying why another cannot run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from contract.errors import TierUnavailable
from contract.tier import TIER_NAMES, Tier

AUTO = "auto"
"""Asks for the best tier that runs on this machine."""

TierFactory = Callable[[int | None], Tier]
"""Opens a tier; the argument is the most host threads it may use, None for all cores."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Whether one tier runs here. ``reason`` and ``remedy`` are empty when it does."""

    name: str
    available: bool
    device: str = ""
    reason: str = ""
    remedy: str = ""


def _open_cpu(threads: int | None) -> Tier:
    from reference.cpu.tier import CpuTier

    return CpuTier(threads)


TIERS: Mapping[str, TierFactory] = MappingProxyType({"cpu": _open_cpu})
"""The factories of this build, best tier first. A factory raises TierUnavailable."""


def open_tier(name: str = AUTO, threads: int | None = None) -> Tier:
    """The tier called ``name``, or for ``auto`` the first of ``TIERS`` that opens.

    Raises TierUnavailable for a name nobody knows, a tier that this build lacks, and a tier whose
    device or library is missing on this machine.
    """
    if name == AUTO:
        return _open_best(threads)
    if name not in TIERS:
        raise _absent(name)
    return TIERS[name](threads)


def available_tiers() -> tuple[str, ...]:
    """Names of the tiers that open on this machine, best first."""
    statuses = {status.name: status for status in probe()}
    return tuple(name for name in TIERS if statuses[name].available)


def probe() -> list[TierStatus]:
    """The status of every tier of the design, in the design's order."""
    return [_status(name) for name in TIER_NAMES]


def _open_best(threads: int | None) -> Tier:
    reasons = []
    for name, factory in TIERS.items():
        try:
            return factory(threads)
        except TierUnavailable as error:
            reasons.append(f"{name}: {error.reason}")
    raise TierUnavailable(AUTO, "; ".join(reasons), "see zinc-rt check")


def _absent(name: str) -> TierUnavailable:
    built = f"it has {', '.join(TIERS)}"
    if name in TIER_NAMES:
        return TierUnavailable(name, "this build has no such tier", built)
    known = ", ".join((AUTO, *TIER_NAMES))
    return TierUnavailable(name, "there is no tier of that name", f"choose one of {known}")


def _status(name: str) -> TierStatus:
    try:
        with open_tier(name) as tier:
            return TierStatus(name, True, device=tier.info.device)
    except TierUnavailable as error:
        return TierStatus(name, False, reason=error.reason, remedy=error.remedy)
