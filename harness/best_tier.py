"""Chooses the tier of ``--tier auto``: the fastest one that runs. Says why a faster one does
not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from contract.errors import TierUnavailable

PCI_DEVICES = Path("/sys/bus/pci/devices")
DISPLAY_CLASS = "0x03"
"""The first digits of the PCI class of every graphics card."""
NVIDIA, AMD, INTEL = 0x10DE, 0x1002, 0x8086
PROCESSOR_TIERS = ("native", "opencl", "cpu")
CARD_TIERS: Mapping[str, tuple[int, ...]] = {"cuda": (NVIDIA,), "vulkan": (NVIDIA, AMD)}
"""The makers of the graphics cards that a tier runs on."""

T = TypeVar("T")


def open_best(
    factories: Mapping[str, Callable[[], T]],
    makers: frozenset[int],
    note: Callable[[str], None] | None = None,
) -> T:
    """Return the result of the first of ``factories`` that does not raise TierUnavailable.

    If a faster tier failed that should run on this machine, ``note`` is called with one line that
    says why. Tiers for processors should always run, those for graphics cards if the machine has a
    card of one of their ``makers``. Raises TierUnavailable if no tier can be opened."""
    missing: list[TierUnavailable] = []
    for name, factory in factories.items():
        try:
            opened = factory()
        except TierUnavailable as error:
            missing.append(error)
            continue
        expected = [error for error in missing if is_expected(error.tier, makers)]
        if expected and note is not None:
            first = expected[0]
            remedy = f"; {first.remedy}" if first.remedy else ""
            note(f"tier {name} is used, a slower one than {first.tier}: {first.reason}{remedy}")
        return opened
    reasons = "; ".join(f"{error.tier}: {error.reason}" for error in missing)
    raise TierUnavailable("auto", reasons, "see zinc-rt check")


def is_expected(tier: str, makers: frozenset[int]) -> bool:
    """Whether a tier should run on a machine with graphics cards of these makers."""
    return tier in PROCESSOR_TIERS or not makers.isdisjoint(CARD_TIERS.get(tier, ()))


def card_makers(devices: Path = PCI_DEVICES) -> frozenset[int]:
    """PCI vendor numbers of this machine's graphics cards; empty on systems other than Linux."""
    try:
        found = [path for path in devices.iterdir() if _word(path / "class")[:4] == DISPLAY_CLASS]
        return frozenset(int(_word(path / "vendor"), 16) for path in found)
    except (OSError, ValueError):
        return frozenset()


def lists_cards() -> bool:
    """Whether ``card_makers`` works on this system."""
    return PCI_DEVICES.is_dir()


def _word(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
