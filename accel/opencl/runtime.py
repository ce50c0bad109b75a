"""An opened device: its context, queue, memory and program, and how it executes packets."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accel.opencl.contents import StepPrograms
from accel.opencl.device import POCL_COMPILES_ONCE, Device, import_binding
from accel.opencl.driver import TIER
from accel.opencl.launcher import (
    LAUNCH_GROUPS_PER_UNIT,
    LaunchContext,
    Launcher,
    Mode,
    PacketLauncher,
    PersistentLauncher,
    WorkersLost,
)
from accel.opencl.memory import BankedMemory, Memory
from accel.opencl.program import (
    BuildOptions,
    base_files,
    build_program,
    build_step_program,
    copy_files,
    cpu_flags,
    module_options,
)
from accel.opencl.self_check import SelfTest, check_layout, native_arithmetic
from accel.packets.build import Progress
from accel.packets.host_memory import SharedMemory
from accel.packets.ops import NUMBERS
from accel.packets.packet import PACKET
from accel.packets.rules import ROW_PARTS
from accel.packets.step_memory import WorkerScratch
from accel.packets.worker_tuner import AdaptiveWorkers, WorkerChoice
from contract.errors import TierUnavailable
from contract.lazy_dataclass import dataclass

FUTEX_X86_64 = 202
PROBE_SPIN_LIMIT = 1 << 27
PROBE_ROUNDS = 64
PROBE_WIDTH = 16
"""The number of floats in a row of the probe."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a caller about a device; for None the probes decide.

    ``threads`` is the most cores of a CPU device to use; ``worker_choice`` makes, from that number,
    the object that chooses how many of them each step gets. ``memory_bytes`` is the most memory,
    ``cache`` the folder of built programs; None stores none. When ``native_arithmetic`` is False,
    division and square root are computed with integers even if the self-test passes."""

    mode: Mode = Mode.AUTO
    threads: int | None = None
    worker_choice: Callable[[int], WorkerChoice] = AdaptiveWorkers
    memory_bytes: int | None = None
    cache: Path | None = None
    shared_addresses: bool | None = None
    native_arithmetic: bool | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """The objects of an opened device that a tier uses."""

    device: Device
    context: Any
    memory: Memory
    launch: LaunchContext
    launcher: Launcher
    mode: Mode
    parts: int
    """The number of pieces that a row reduction is divided into."""


def open_runtime(device: Device, choices: Choices, progress: Progress | None = None) -> Runtime:
    """Test the device, build the program and choose how to execute packets. Raises TierUnavailable
    when the device does not compute exactly, BuildError when its compiler rejects the kernels."""
    cl = import_binding()
    if device.is_pocl:
        os.environ.setdefault(*POCL_COMPILES_ONCE)
    try:
        context = cl.Context([device.handle])
        timed = cl.PROFILING_ENABLE if device.is_cpu else 0
        queue = cl.CommandQueue(context, device.handle, timed)
    except cl.Error as error:
        raise TierUnavailable(
            TIER, f"{device.name} cannot be opened ({error})", "free the device or choose another"
        ) from None
    options = probe_options(context, queue, device, choices)
    memory = _memory(cl, context, queue, device, options, choices)
    units = device.compute_units
    if device.is_cpu and choices.threads is not None:
        units = max(1, min(units, choices.threads))

    def context_of(program: Any, programs: StepPrograms | None = None) -> LaunchContext:
        return LaunchContext(cl, queue, program, memory, WorkerScratch(), programs)

    def build(files: Mapping[str, str], flags: str) -> Any:
        return build_program(context, device, files, flags, choices.cache, progress)

    if not device.is_cpu:
        copying = build(copy_files(), options.text(device)) if memory.shared else None
        launch = context_of(copying)
        from accel.opencl.modules import ModuleLauncher

        modules = ModuleLauncher(
            launch,
            units * LAUNCH_GROUPS_PER_UNIT,
            options.traits(),
            lambda name, text: build({name: text}, module_options(device)),
        )
        return Runtime(device, context, memory, launch, modules, Mode.LAUNCH, ROW_PARTS)

    base = build(base_files(), replace(options, persistent=True).text(device))

    def context_for_mode(persistent: bool) -> LaunchContext:
        flags = replace(options, persistent=persistent).text(device)
        return context_of(
            base,
            StepPrograms(
                lambda parts: build_step_program(
                    context, device, parts, flags, choices.cache, progress
                )
            ),
        )

    mode, chosen, launcher = _launcher(context_for_mode, choices, units)
    return Runtime(device, context, memory, chosen, launcher, mode, launcher.workers)


def _launcher(
    context_of: Callable[[bool], LaunchContext], choices: Choices, workers: int
) -> tuple[Mode, LaunchContext, Launcher]:
    """Choose how the cores of a processor execute packets."""
    if choices.mode is not Mode.LAUNCH:
        persistent = context_of(True)
        requested = choices.mode is Mode.PERSISTENT
        if requested or _runs_together(persistent, workers):
            choice = choices.worker_choice(workers)
            launcher = PersistentLauncher(persistent, workers, choice=choice)
            return Mode.PERSISTENT, persistent, launcher
    single = context_of(False)
    return Mode.LAUNCH, single, PacketLauncher(single, workers)


def _runs_together(launch: LaunchContext, workers: int) -> bool:
    """Whether all workers run at the same time and see each other's writes.

    Workers pass rows to each other through two buffers that they overwrite repeatedly, so that a
    stale cache line changes the result. They wait for one another only for a short time."""
    launcher = PersistentLauncher(launch, workers, PROBE_SPIN_LIMIT)
    memory = launch.memory
    rows = launcher.workers
    start = np.arange(rows * PROBE_WIDTH, dtype=np.float32).reshape(rows, PROBE_WIDTH)
    next_row = np.roll(np.arange(rows, dtype=np.int32), -1)
    buffers = [
        memory.adopt("opencl.probe", data.view(np.uint8))
        for data in (start.copy(), np.zeros_like(start), next_row)
    ]
    packets = np.zeros(PROBE_ROUNDS, PACKET)
    packets["op"] = NUMBERS["select_rows"]
    packets["wait"] = 1
    packets["size"][:, :2] = rows, PROBE_WIDTH
    packets["stride"][:, :3] = PROBE_WIDTH, 1, PROBE_WIDTH
    even, odd, order = (buffer.address for buffer in buffers)
    packets["operand"][0::2, :3] = even, order, odd
    packets["operand"][1::2, :3] = odd, order, even
    buffers.append(memory.adopt("opencl.probe", packets.view(np.uint8)))
    launcher.record(packets, buffers[-1].address).enqueue(0, tokens=1)
    memory.to_host()
    launch.queue.finish()
    try:
        launcher.check()
        moved = memory.map(buffers[0]).view(np.float32).reshape(rows, PROBE_WIDTH)
        return bool(np.array_equal(moved, np.roll(start, -PROBE_ROUNDS, axis=0)))
    except WorkersLost:
        return False
    finally:
        for buffer in buffers:
            memory.free(buffer)
        launcher.close()


def probe_options(context: Any, queue: Any, device: Device, choices: Choices) -> BuildOptions:
    """The options that the self-test allows: native division and roots only if they are exact."""
    shared = choices.shared_addresses
    options = BuildOptions(
        persistent=False,
        shared_addresses=device.is_cpu if shared is None else shared,
        native_divide=choices.native_arithmetic is not False,
        native_sqrt=choices.native_arithmetic is not False,
        futex_syscall=_futex_syscall(device),
        packed_dot=not device.is_cpu and "nvidia" in device.platform.lower(),
        dot_vnni=device.is_cpu and device.is_pocl and "avx512_vnni" in cpu_flags(),
    )
    test = SelfTest(context, queue, device, options, choices.cache)
    check_layout(test)
    if options.shared_addresses and not test.reads_host_addresses():
        options = replace(options, shared_addresses=False)
    divide, root = native_arithmetic(test)
    if divide and root:
        return options
    options = replace(options, native_divide=divide, native_sqrt=root)
    test = SelfTest(context, queue, device, options, choices.cache)
    if native_arithmetic(test) != (True, True):
        raise TierUnavailable(
            TIER,
            f"{device.name} rounds division or square root wrongly even in integers",
            "choose another device or a newer driver",
        )
    return options


def _futex_syscall(device: Device) -> int:
    """The number of the system call futex if kernels run as threads of this process, else 0."""
    linux = platform.system() == "Linux" and platform.machine() == "x86_64"
    return FUTEX_X86_64 if device.is_pocl and device.is_cpu and linux else 0


def _memory(
    cl: Any, context: Any, queue: Any, device: Device, options: BuildOptions, choices: Choices
) -> Memory:
    capacity = device.memory_bytes
    if choices.memory_bytes is not None:
        capacity = min(capacity, choices.memory_bytes)
    if options.shared_addresses:
        return SharedMemory(capacity)
    largest = min(device.max_allocation_bytes, capacity)
    return BankedMemory(cl, context, queue, capacity, largest)
