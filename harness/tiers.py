"""The tiers of this build: opening one by name, and saying why another cannot run here."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from accel.user_folders import user_folder
from accel.wheel_parts import missing_part
from contract.errors import TierUnavailable
from contract.lazy_dataclass import dataclass
from contract.tier_names import TIER_NAMES
from harness.best_tier import INTEL, PROCESSOR_TIERS, card_makers, lists_cards, open_best

if TYPE_CHECKING:
    from accel.packets.worker_tuner import WorkerChoice
    from contract.tier import Tier

AUTO = "auto"
"""Asks for the best tier that runs on this machine."""
SIMULATED = "simulated"
"""The device of Metal, T1 and T2 that needs no GPU: kernels, packets and calls are the real ones,
and what they are given to is this process."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of a caller for a tier; a tier ignores those of other tiers.

    ``threads`` is the most host threads to use, None for all cores. ``device`` is a part of a
    device's name, empty for the first; for CUDA it may be a number, several with commas, or all.
    ``workers`` is how many workers every step gets on a tier for processors, None to adapt.
    ``opencl_mode`` is auto, persistent or launch; ``opencl_device`` replaces ``device`` for that
    tier. ``note`` is called with a line before long work, such as compiling kernels."""

    threads: int | None = None
    device: str = ""
    workers: int | None = None
    opencl_mode: str = "auto"
    opencl_device: str = ""
    note: Callable[[str], None] | None = None


LINKER = "ld"
LINKER_REMEDY = f"install the linker {LINKER} (apt install binutils)"
_is_probe = False
"""Whether this process only looks which tiers run."""
TierFactory = Callable[[TierOptions], "Tier"]
DEFAULT_OPTIONS = TierOptions()


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Whether one tier runs here. ``reason`` and ``remedy`` are empty when it does.

    ``details`` are lines about each of the tier's devices."""

    name: str
    available: bool
    device: str = ""
    reason: str = ""
    remedy: str = ""
    details: tuple[str, ...] = ()


def kernel_cache(tier: str) -> Path:
    """The folder in which a tier keeps the kernels it built."""
    return user_folder("cache") / tier


def arranged_folder() -> Path:
    """The folder in which the native tier stores arranged weights; it may be deleted any time."""
    return kernel_cache("native") / "weights"


def lowered_folder() -> Path:
    """The folder in which the native tier stores lowered steps; it may be deleted any time."""
    return kernel_cache("native") / "lowered"


def _open_cpu(options: TierOptions) -> Tier:
    from contract.processors import processor_name

    name = processor_name()
    if options.device.lower() not in name.lower():
        raise TierUnavailable("cpu", f"no processor matches {options.device!r}", f"there is {name}")
    from reference.cpu.tier import CpuTier

    return CpuTier(options.threads)


def _worker_choice(options: TierOptions) -> Callable[[int], WorkerChoice]:
    """Makes, from the most workers, the object that chooses the workers of each step."""
    from accel.packets.worker_tuner import AdaptiveWorkers, FixedWorkers

    fixed = options.workers
    return AdaptiveWorkers if fixed is None else lambda cores: FixedWorkers(min(fixed, cores))


def _open_opencl(options: TierOptions) -> Tier:
    if sys.platform == "linux" and shutil.which(LINKER) is None and not _is_probe:
        # PoCL ends the process where it cannot link a kernel; others need no such program.
        status = _probe_drivers(["opencl"])["opencl"]
        if not status.available:
            raise TierUnavailable("opencl", status.reason, status.remedy)
    from accel.opencl.launcher import Mode
    from accel.opencl.runtime import Choices
    from accel.opencl.tier import OpenClTier

    cache = kernel_cache("opencl")
    choices = Choices(
        mode=Mode(options.opencl_mode),
        threads=options.threads,
        worker_choice=_worker_choice(options),
        cache=cache,
    )
    return OpenClTier(options.opencl_device or options.device, choices, options.note)


def _open_native(options: TierOptions) -> Tier:
    from accel.native.tier import Choices, NativeTier

    choices = Choices(
        threads=options.threads,
        worker_choice=_worker_choice(options),
        cache=kernel_cache("native"),
        weights=arranged_folder(),
        lowered=lowered_folder(),
    )
    return NativeTier(options.device, choices, options.note)


def _open_cuda(options: TierOptions) -> Tier:
    from accel.cuda.driver import import_binding

    # The tier is many modules, which most machines have no use for.
    import_binding()
    from accel.cuda.multi_device import open_cuda
    from accel.cuda.runtime import Choices

    cache = kernel_cache("cuda")
    return open_cuda(options.device, Choices(cache=cache), options.note)


def _open_vulkan(options: TierOptions) -> Tier:
    from accel.vulkan.runtime import Choices
    from accel.vulkan.tier import VulkanTier

    cache = kernel_cache("vulkan")
    return VulkanTier(options.device, Choices(cache=cache))


def _open_vulkan_card(options: TierOptions) -> Tier:
    """The Vulkan tier on a graphics card with memory of its own; TierUnavailable without one."""
    from accel.vulkan.api import load_vulkan
    from accel.vulkan.device import Instance, Kind

    with Instance(load_vulkan()) as instance:
        device = instance.device(options.device)
    if device.kind is not Kind.DISCRETE:
        reason = f"{device.name} is no graphics card of its own"
        raise TierUnavailable("vulkan", reason, "--tier vulkan uses it all the same")
    return _open_vulkan(options)


def _open_metal(options: TierOptions) -> Tier:
    if options.device == SIMULATED:
        from accel.metal.tools.simulated import open_simulated

        return open_simulated()
    from accel.metal.tier import MetalTier

    return MetalTier(options.device)


def _open_intel(options: TierOptions, discrete: bool = False) -> Tier:
    """The tier of Intel's GPUs; with ``discrete`` on a graphics card with memory of its own
    alone."""
    from accel.intel.runtime import Choices
    from accel.intel.tier import IntelTier

    return IntelTier(options.device, Choices(cache=kernel_cache("intel"), discrete=discrete))


def _open_amd(options: TierOptions, tier: str) -> Tier:
    if options.device == SIMULATED:
        from accel.amd.tools.simulated import open_simulated

        return open_simulated(tier)
    from accel.amd.tier import AmdTier

    return AmdTier(options.device, tier=tier)


TIERS: dict[str, TierFactory] = {
    "cuda": _open_cuda,
    "native": _open_native,
    "opencl": _open_opencl,
    "cpu": _open_cpu,
    "vulkan": _open_vulkan,
    "metal": _open_metal,
    "t1": partial(_open_amd, tier="t1"),
    "t2": partial(_open_amd, tier="t2"),
    "intel": _open_intel,
}
"""The factories of this build, best tier first; what comes after the CPU runs when it is named. A
factory raises TierUnavailable."""
REPORTED = ("cuda", "vulkan", "metal", "intel")
"""Tiers that tell further facts about their devices."""
DRIVERS = ("cuda", "opencl", "vulkan", "intel")
"""Tiers that load a driver of somebody else's into the process."""
_first_opened: dict[str, int] = {}
"""The process that opened a tier of DRIVERS first, by the tier's name."""
PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from harness.tiers import print_statuses
print_statuses(sys.argv[2:])
"""
"""The program of the process that loads drivers."""


def open_tier(name: str = AUTO, options: TierOptions = DEFAULT_OPTIONS) -> Tier:
    """The tier called ``name``, or for ``auto`` the fastest that opens: CUDA, Vulkan on a graphics
    card, Level Zero on a card of Intel's, then those of processors. A device that ``options`` name
    is used or missed, never another. Raises TierUnavailable for a name nobody knows, a tier that
    this build lacks, and a tier whose device or library is missing on this machine."""
    if name == AUTO:
        return _open_best(options)
    if name not in TIERS:
        known = ", ".join((AUTO, *TIER_NAMES))
        raise TierUnavailable(name, "there is no tier of that name", f"choose one of {known}")
    return _opened(name, TIERS[name], options)


def check_tiers(names: Iterable[str], options: TierOptions = DEFAULT_OPTIONS) -> None:
    """Open each of these tiers and close it. Raises TierUnavailable as ``open_tier`` does."""
    for name in names:
        open_tier(name, options).close()


def device_lines(name: str) -> tuple[str, ...]:
    """Facts about the devices of a tier among REPORTED, as lines. Raises TierUnavailable."""
    with _parts_of_wheel(name):
        module = "device" if name == "cuda" else "tier"
        lines: tuple[str, ...] = import_module(f"accel.{name}.{module}").device_lines()
    return lines


def _opened(name: str, factory: TierFactory, options: TierOptions) -> Tier:
    """The tier of a factory. Raises TierUnavailable where this system's wheel has no such tier,
    and in a fork of a process that loaded the driver, which waits for threads a fork lacks."""
    if _first_opened.get(name, os.getpid()) != os.getpid():
        reason = "its driver is open in the process that this one was forked from"
        remedy = "start processes by multiprocessing's method spawn"
        raise TierUnavailable(name, reason, remedy)
    with _parts_of_wheel(name):
        tier = factory(options)
    if name in DRIVERS:
        _first_opened.setdefault(name, os.getpid())
    return tier


@contextmanager
def _parts_of_wheel(name: str) -> Iterator[None]:
    """Raise TierUnavailable for a tier whose modules this wheel leaves out."""
    try:
        yield
    except ModuleNotFoundError as error:
        part = missing_part(error.name or "")
        if part is None:
            raise
        raise TierUnavailable(name, *part) from None


def probe() -> list[TierStatus]:
    """The status of every tier of the design, in the design's order."""
    found = _probe_drivers([name for name in TIER_NAMES if name in DRIVERS])
    return [found.get(name) or _status(name) for name in TIER_NAMES]


def print_statuses(names: Sequence[str]) -> None:
    """Print the status of each tier as a line of JSON, and what its driver prints to stderr."""
    global _is_probe
    _is_probe = True
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        for name in names:
            print(json.dumps(dataclasses.asdict(_status(name))), file=lines, flush=True)


def _probe_drivers(names: Sequence[str]) -> dict[str, TierStatus]:
    """The statuses of tiers by name, found by a child process: a driver that crashes ends the
    child, and another child goes on with the next tier."""
    import subprocess

    found: dict[str, TierStatus] = {}
    while left := names[len(found) :]:
        command = [sys.executable, "-c", PROBE, json.dumps(sys.path), *left]
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        for line in child.stdout.splitlines():
            status = json.loads(line)
            found[status["name"]] = TierStatus(**{**status, "details": tuple(status["details"])})
        if len(found) < len(names):
            name = names[len(found)]
            last_words = " ".join(child.stderr.split())[-200:]
            reason = f"its driver ends the process (status {child.returncode}): {last_words}"
            links = f'"{LINKER}"' in last_words
            remedy = LINKER_REMEDY if links else "repair or remove that driver"
            found[name] = TierStatus(name, False, "", reason, remedy)
    return found


def _open_best(options: TierOptions) -> Tier:
    """The fastest tier; where a device is named, of those that have it."""
    order: dict[str, TierFactory] = {
        "cuda": _open_cuda,
        "vulkan": _open_vulkan_card,
        "intel": partial(_open_intel, discrete=True),
        **{name: TIERS[name] for name in PROCESSOR_TIERS},
    }
    makers = card_makers()
    if INTEL not in makers:
        del order["intel"]
    if lists_cards() and not makers:
        # Loading Vulkan's drivers takes as long as all the rest of a start.
        del order["vulkan"]
    if options.device.replace(",", "").isdecimal():
        order = {"cuda": _open_cuda}
    elif options.opencl_device and not options.device:
        order = {"opencl": _open_opencl}
    factories = {name: partial(_opened, name, order[name], options) for name in order}
    return open_best(factories, makers, options.note)


def _status(name: str) -> TierStatus:
    details: tuple[str, ...] = ()
    try:
        if name in REPORTED:
            details = device_lines(name)
        with open_tier(name) as tier:
            return TierStatus(name, True, device=tier.info.device, details=details)
    except TierUnavailable as error:
        return TierStatus(name, False, "", error.reason, error.remedy, details)
