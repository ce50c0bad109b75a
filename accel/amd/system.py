"""Facts about the system that matter to the tiers, found without opening a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from accel.amd.generation import BY_ARCHITECTURE, GFX11, GFX12, Generation
from accel.amd.kernel import Kernel
from accel.amd.topology import gpus

RELEASE = "/proc/sys/kernel/osrelease"
USER_QUEUES = "/sys/module/amdgpu/parameters/user_queue"
FIRMWARE = "/sys/class/drm/renderD128/device/fw_version"
LINUX: Mapping[str, tuple[int, int]] = {"t1": (6, 12), "t2": (6, 16)}
"""The first version of Linux with what a tier needs of its driver on gfx12."""
OFFERING = ("1", "2")
"""Values of the parameter that make amdgpu offer user queues."""
FLOORS: Mapping[Generation, Mapping[str, int]] = {
    GFX12: {"me": 2780, "pfp": 2840, "mec": 3050, "mes": 123},
    GFX11: {"me": 2390, "pfp": 2530, "mec": 2600, "mes": 120},
}
"""The first versions of the firmware for which amdgpu offers user queues (``gfx_v12_0.c``,
``gfx_v11_0.c``)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, and a remedy, empty if all is well."""

    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.fact}: {self.remedy}" if self.remedy else self.fact


def findings(kernel: Kernel, tier: str) -> Iterator[Finding]:
    """The facts for tier ``t1`` or ``t2``. A fact that the system does not report is no obstacle:
    opening the tier decides."""
    yield _linux(kernel, tier)
    if tier == "t2":
        yield _offered(kernel)
        floors = FLOORS[_generation(kernel)]
        yield from (_firmware(kernel, name, floor) for name, floor in floors.items())


def _generation(kernel: Kernel) -> Generation:
    """Of the first GPU that amdkfd names, the newest where it names none."""
    with suppress(OSError):
        for gpu in gpus(kernel):
            if gpu.architecture in BY_ARCHITECTURE:
                return BY_ARCHITECTURE[gpu.architecture]
    return GFX12


def _linux(kernel: Kernel, tier: str) -> Finding:
    text = _text(kernel, RELEASE)
    numbers = [int(part) for part in text.split("-")[0].split(".")[:2] if part.isdigit()]
    requested = LINUX[tier]
    old = len(numbers) == 2 and tuple(numbers) < requested
    remedy = f"update it to {requested[0]}.{requested[1]} or newer" if old else ""
    return Finding(f"Linux {text or '(release not known)'}", remedy)


def _offered(kernel: Kernel) -> Finding:
    value = _text(kernel, USER_QUEUES)
    if not value:
        return Finding("amdgpu.user_queue is not known", "this amdgpu has no user queues")
    remedy = "" if value in OFFERING else "boot with amdgpu.user_queue=1"
    return Finding(f"amdgpu.user_queue={value}", remedy)


def _firmware(kernel: Kernel, name: str, floor: int) -> Finding:
    text = _text(kernel, f"{FIRMWARE}/{name}_fw_version")
    try:
        version = int(text, 0)
    except ValueError:
        return Finding(f"firmware {name}: not known")
    remedy = f"update linux-firmware, user queues want {floor}" if version < floor else ""
    return Finding(f"firmware {name} {version}", remedy)


def _text(kernel: Kernel, path: str) -> str:
    try:
        return kernel.read_text(path).strip()
    except OSError:
        return ""
