"""Modules that the wheel of a system leaves out, because nothing on that system can run them."""

from __future__ import annotations

import sys
from pathlib import Path

from contract.lazy_dataclass import dataclass

SYSTEM_NAMES = {"linux": "Linux", "macos": "macOS", "windows": "Windows"}
SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
"""The system of every ``sys.platform``."""
CHECKOUT = "simulated GPUs and their compilers are in a checkout: pip install -e ."


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A module, or a package with all its files, that only the wheels of ``systems`` have.
    ``remedy`` says what it needs."""

    name: str
    systems: tuple[str, ...]
    remedy: str

    @property
    def path(self) -> str:
        """The file or folder, without a suffix, relative to the root of the packages."""
        return self.name.replace(".", "/")


METAL, AMD, CUDA = "Metal needs macOS", "the AMD tiers need Linux", "CUDA needs Linux or Windows"
PARTS = (
    *(WheelPart(f"accel.metal.{name}", (), CHECKOUT) for name in ("sim", "tools")),
    WheelPart("accel.metal", ("macos",), METAL),
    WheelPart("accel.amd.sim", (), CHECKOUT),
    *(
        WheelPart(f"accel.amd.tools.{name}", (), CHECKOUT)
        for name in ("assemble", "build", "performance", "simulated")
    ),
    WheelPart("harness.amd_performance", (), CHECKOUT),
    WheelPart("accel.amd", ("linux",), AMD),
    WheelPart("harness.amd_card", ("linux",), AMD),
    WheelPart("accel.cuda", ("linux", "windows"), CUDA),
    WheelPart("accel.intel", ("linux", "windows"), "Level Zero needs Linux or Windows"),
)
"""The parts, each before those that hold it. A checkout has all of them."""


def part_of(module: str) -> WheelPart | None:
    """The part that a module belongs to; None for one that every wheel has."""
    for part in PARTS:
        if module == part.name or module.startswith(f"{part.name}."):
            return part
    return None


def is_left_out(path: Path, system: str) -> bool:
    """Whether the wheels of a system leave out a file; ``path`` is relative to the root of the
    packages."""
    name = path.as_posix()
    return any(
        system not in part.systems and name.startswith((f"{part.path}/", f"{part.path}."))
        for part in PARTS
    )


def missing_part(module: str) -> tuple[str, str] | None:
    """The reason why a module cannot be imported, and the extra it needs; None for a module of
    every wheel."""
    part = part_of(module)
    if part is None:
        return None
    here = SYSTEM_NAMES.get(SYSTEMS.get(sys.platform, ""), sys.platform)
    return f"this wheel for {here} has no {part.name}", part.remedy
