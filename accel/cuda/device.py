"""Finds CUDA devices, and reports what is missing when there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel.cuda.driver import TIER, Driver, open_driver
from contract.errors import TierUnavailable

PEER_REMEDY = "see nvidia-smi topo -p2p rw"
MIN_CAPABILITY = (8, 0)
MIN_DRIVER = 13000
"""CUDA 13.0: a driver runs the output of compilers of its own major version."""


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device. Sizes in bytes.

    ``capability`` is major and minor, ``shared_bytes`` the most shared memory of a block that asks
    for it, ``driver`` the CUDA version of the driver: 1000 times the major one, 10 times the minor.
    With ``mps_enabled`` kernels of other processes run at the same time (NVIDIA's Multi-Process
    Service), else processes take turns."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_bytes: int
    driver: int
    mps_enabled: bool = False

    @property
    def architecture(self) -> str:
        """The target of the compiler. Products of warp groups exist in sm_90a only."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.capability == (9, 0) else ''}"

    @property
    def numbered(self) -> str:
        """The name with the device number, which tells equal devices apart."""
        return f"{self.name} ({self.ordinal})"

    @property
    def driver_text(self) -> str:
        """The driver's CUDA version as major.minor."""
        return f"{self.driver // 1000}.{self.driver % 1000 // 10}"


def find_devices(driver: Driver) -> list[Device]:
    """Every device of the machine, usable or not."""
    version = driver.call("cuDriverGetVersion")
    return [_describe(driver, n, version) for n in range(driver.call("cuDeviceGetCount"))]


def find_device(driver: Driver, requested: str = "") -> Device:
    """The device with number ``requested``, or the first usable one whose name contains it,
    ignoring case; another number must be all digits of one in the name. Raises TierUnavailable
    saying what the devices lack."""
    devices = find_devices(driver)
    if requested.isdecimal() and int(requested) < len(devices):
        named = [devices[int(requested)]]
    elif requested.isdecimal():
        named = [device for device in devices if requested in re.findall(r"\d+", device.name)]
    else:
        named = [device for device in devices if requested.lower() in device.name.lower()]
    usable = [device for device in named if device.capability >= MIN_CAPABILITY]
    if usable and usable[0].driver < MIN_DRIVER:
        raise TierUnavailable(
            TIER,
            f"the driver is for CUDA {usable[0].driver_text}, needs 13.0",
            "install NVIDIA's driver, version 580 or newer",
        )
    if usable:
        return usable[0]
    if named:
        capability = ".".join(map(str, named[0].capability))
        reason = f"{named[0].name} has compute capability {capability}, needs 8.0"
        raise TierUnavailable(TIER, reason, "use a device of the Ampere generation or newer")
    names = ", ".join(device.numbered for device in devices)
    raise TierUnavailable(TIER, f"no CUDA device matches {requested!r}", f"there is {names}")


def find_together(driver: Driver, names: Sequence[str]) -> list[int]:
    """The numbers of the devices ``names``, as in ``find_device``, which together can be one tier.
    Raises TierUnavailable if they cannot."""
    if not all(names):
        raise TierUnavailable(TIER, "a device has no name", "write --device 0,1")
    devices = [find_device(driver, name) for name in names]
    first = devices[0]
    for number, device in enumerate(devices):
        if device.ordinal in [other.ordinal for other in devices[:number]]:
            reason = f"device {device.numbered} is named twice"
            raise TierUnavailable(TIER, reason, "name devices by their numbers: --device 0,1")
        if device.architecture != first.architecture:
            reason = (
                f"{first.numbered} is {first.architecture} and {device.numbered} "
                f"{device.architecture}"
            )
            raise TierUnavailable(TIER, reason, "take devices of one architecture")
    for one in devices:
        for other in devices:
            if one is not other and not reaches(driver, one, other):
                reason = f"{one.numbered} cannot reach the memory of {other.numbered}"
                raise TierUnavailable(TIER, reason, PEER_REMEDY)
    return [device.ordinal for device in devices]


def _describe(driver: Driver, ordinal: int, version: int) -> Device:
    handle = driver.call("cuDeviceGet", ordinal)
    attributes = driver.binding.CUdevice_attribute

    def attribute(name: str) -> int:
        code = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", code, handle))

    name = driver.call("cuDeviceGetName", 256, handle)
    return Device(
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory_bytes=int(driver.call("cuDeviceTotalMem", handle)),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        driver=version,
        mps_enabled=bool(attribute("MPS_ENABLED")),
    )


CLUSTER_CAPABILITY = (9, 0)
CLUSTER_BLOCKS = 2
"""Blocks of a cluster. Multiprocessors come in pairs; clusters of four leave some without a block,
since a cluster lies within one part of the device."""


def cluster_grid(tiles: int, blocks: int, device: Device) -> tuple[int, int]:
    """Blocks of a cluster, and of a grid of at most ``blocks``, that compute ``tiles`` in turn.
    Blocks of a cluster run at the same time and access each other's shared memory.

    A cluster is used where sharing tiles gives no block more work than without one."""
    alone = min(tiles, blocks)
    clusters = max(1, min(tiles, blocks // CLUSTER_BLOCKS))
    more_work = -(-tiles // clusters) > CLUSTER_BLOCKS * -(-tiles // alone)
    if device.capability < CLUSTER_CAPABILITY or more_work:
        return 1, alone
    return CLUSTER_BLOCKS, clusters * CLUSTER_BLOCKS


MEBIBYTE = 1 << 20


def device_lines(binding: Any = None) -> tuple[str, ...]:
    """A line for every device: number, architecture, memory, and the devices with which it can form
    one tier because it can access their memory. ``binding`` as in ``open_driver``. Raises
    TierUnavailable if there is no driver or no device."""
    driver = open_driver(binding)
    devices = find_devices(driver)
    return tuple(_line(driver, device, devices) for device in devices)


def reaches(driver: Driver, one: Device, other: Device) -> bool:
    """Whether kernels of ``one`` can access the memory of ``other``."""
    handles = [driver.call("cuDeviceGet", device.ordinal) for device in (one, other)]
    return bool(driver.call("cuDeviceCanAccessPeer", *handles))


def _line(driver: Driver, device: Device, devices: list[Device]) -> str:
    about = f"{device.ordinal} {device.name}: {device.architecture}"
    about += f", {device.memory_bytes // MEBIBYTE:,} MiB"
    if device.capability < MIN_CAPABILITY:
        return f"{about}; too old"
    reached = [
        str(other.ordinal)
        for other in devices
        if other is not device and reaches(driver, device, other)
    ]
    return f"{about}; reaches {', '.join(reached)}" if reached else about
