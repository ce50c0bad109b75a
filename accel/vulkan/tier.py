"""The Vulkan tier: a graph becomes packets, and a bucket's packets one recorded command buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from accel.kernels.arrange import PlaneArranger
from accel.kernels.device_probe import MEBIBYTE, device_line
from accel.kernels.launches import launches_of
from accel.kernels.runtime import DeviceHooks
from accel.packets.arenas import ArenaKind
from accel.packets.fused import fuse
from accel.packets.packet_tier import BoundStep
from accel.packets.repeated import repeat_small
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.shape_buckets import SPLIT_TOKENS, shape_buckets
from accel.packets.step import Schedule, Step
from accel.packets.streaming_tier import StreamingTier
from accel.packets.submissions import CopiedStep, LoweredBatch, OutputCopies, StepFence, Submissions
from accel.packets.tier import tier_info
from accel.vulkan.api import TIER, Vulkan, load_vulkan
from accel.vulkan.device import Device, Instance
from accel.vulkan.expanded_tiles import PLANES_FROM, TILED, with_expanded_tiles
from accel.vulkan.launcher import Recording, launch_packet, max_groups
from accel.vulkan.matrix_tiles import SMALL_BUCKETS, with_tiles_32x16, with_tiles_128x128
from accel.vulkan.memory import Allocation, Memory
from accel.vulkan.push_constants import Packets
from accel.vulkan.queue import Queue
from accel.vulkan.runtime import Choices, Runtime, open_runtime
from contract.arrays import Bytes
from contract.ir.inputs import InputCopy
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey


@dataclass(slots=True)
class VulkanSlot:
    """A copy of a step's inputs, and the commands that copy it to ``target``."""

    data: Allocation
    inputs: InputCopy
    target: Allocation | None = None
    commands: Any = None


VulkanStep = CopiedStep[Allocation]


@dataclass(slots=True)
class _Sync:
    """Commands that copy mapped memory to the device or back."""

    version: int = -1
    commands: list[Any] = field(default_factory=list)


class VulkanSubmissions(Submissions[Allocation, Recording, VulkanSlot, VulkanStep]):
    """See Submissions. ``input_memory`` is where steps read their inputs."""

    def __init__(self, queue: Queue, memory: Memory) -> None:
        super().__init__()
        self._queue = queue
        self._memory = memory
        self._sending = _Sync()
        self._fetching = _Sync()
        self._copies = OutputCopies(
            lambda nbytes: memory.allocate(
                "outputs of a step", nbytes, ArenaKind.HOST, zeroed=False
            )
        )
        self.input_memory: Allocation | None = None

    def close(self) -> None:
        for slots in self._free.values():
            self._queue.free([slot.commands for slot in slots if slot.commands is not None])
        super().close()
        self._copies.clear()

    def _new_slot(self, batch: LoweredBatch[Allocation, Recording]) -> VulkanSlot:
        data = self._memory.allocate("inputs of a step", batch.input_bytes, ArenaKind.HOST)
        return VulkanSlot(data, InputCopy(data.host_view))

    def _launch(
        self,
        batch: LoweredBatch[Allocation, Recording],
        slot: VulkanSlot,
        outputs: Mapping[str, Bytes],
    ) -> VulkanStep:
        recorded = batch.launch.batches
        # What the host wrote into mapped memory counts only if nothing was running.
        before = [] if self._in_flight else self._sync(self._sending, to_device=True)
        self._aim(slot)
        after = self._sync(self._fetching, to_device=False)
        copies = self._copies.take(outputs)
        copying = []
        if copies:
            copying.append(self._queue.record(self._copied(batch, copies, outputs), once=True))
        batches = [[commands] for commands in recorded]
        batches[0] = [*before, slot.commands, *batches[0]]
        batches[-1] = [*batches[-1], *after, *copying]
        number = self._queue.submit(batches)
        for commands in copying:
            self._queue.free_after(number, commands)
        reached = partial(self._queue.reached, number)
        return VulkanStep(number, reached, outputs, copies, self._copies)

    def _aim(self, slot: VulkanSlot) -> None:
        """Record the slot's commands for the current input memory."""
        target = self.input_memory
        assert target is not None
        if slot.target is not target:
            if slot.commands is not None:
                self._queue.free([slot.commands])
            slot.target, slot.commands = None, None
            slot.commands = self._queue.record(self._sent(slot.data, target))
            slot.target = target

    def _sent(self, data: Allocation, target: Allocation) -> Any:
        """Returns a function that records a copy which waits until the previous step has read its
        inputs."""

        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            self._memory.record_copy(commands, data, 0, target, 0, data.nbytes)

        return fill

    def _sync(self, exchange: _Sync, to_device: bool) -> list[Any]:
        """The commands for the memory that is mapped now, recorded again when that changed."""
        memory = self._memory
        if exchange.version != memory.exchanges:
            self._queue.finish()
            self._queue.free(exchange.commands)
            mapped = memory.mirrored(to_device)
            record = self._queue.record
            exchange.commands = [record(self._mirrored(mapped))] if mapped else []
            exchange.version = memory.exchanges
        return exchange.commands

    def _mirrored(self, mapped: Sequence[tuple[Allocation, Allocation]]) -> Any:
        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            for source, target in mapped:
                self._memory.record_copy(commands, source, 0, target, 0, target.nbytes)
            self._queue.barrier(commands)

        return fill

    def _copied(
        self,
        batch: LoweredBatch[Allocation, Recording],
        copies: Mapping[str, Allocation],
        outputs: Mapping[str, Bytes],
    ) -> Any:
        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            for name, target in copies.items():
                source, nbytes = batch.outputs[name][1], outputs[name].nbytes
                self._memory.record_copy(commands, source, 0, target, 0, nbytes)
            self._queue.barrier(commands)

        return fill


PROMPT_TOKENS = 512
"""Prompt tokens of a step, with which its products were measured."""
PARTS = 128
"""Parts of a context that attention computes in parallel: this many tiles, or spans of tiles."""


class VulkanTier(DeviceHooks, StreamingTier[Allocation, Recording, VulkanStep]):
    """See ``contract.tier.Tier``. ``device`` is part of a device's or driver's name. Raises
    TierUnavailable when there is no such device, it lacks something, or its arithmetic is not
    exact. ``vulkan`` is the library, by default that of this machine."""

    _memory: Memory
    _runtime: Runtime
    _submissions: VulkanSubmissions

    def __init__(
        self, device: str = "", choices: Choices | None = None, vulkan: Vulkan | None = None
    ) -> None:
        runtime = open_runtime(vulkan or load_vulkan(), device, choices or Choices())
        self._runtime = runtime
        found, memory = runtime.queue.device, runtime.memory
        self._arranger = PlaneArranger(
            memory,
            partial(launch_packet, memory, runtime.program),
            max_groups(found),
            partial(memory.allocate, zeroed=False),
        )
        driver = f"{found.driver}, Vulkan {found.version[0]}.{found.version[1]}"
        info = tier_info(TIER, found.name, driver, memory.capacity, memory.shared, PROMPT_TOKENS)
        super().__init__(info, memory, VulkanSubmissions(runtime.queue, memory))

    @property
    def device(self) -> Device:
        """The open device."""
        return self._runtime.queue.device

    @property
    def streams(self) -> bool:
        return not self._memory.shared

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        if not self.traits.matrix:
            return shape_buckets(largest)
        tiled = (TILED,) if largest.tokens >= PLANES_FROM else ()
        return shape_buckets(largest, (1, SPLIT_TOKENS, *SMALL_BUCKETS, *tiled))

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        lowered = lower_graph(graph, bucket, PARTS, TIER)
        matrix = self.traits.matrix
        step = repeat_small(fuse(lowered, matrix, attention=matrix))
        step = with_tiles_32x16(with_tiles_128x128(with_expanded_tiles(step))) if matrix else step
        copying, seen = self._copying(graph, step)
        return copying, schedule_levels(seen)

    def _on_host(self, purpose: str, nbytes: int) -> Allocation:
        name = f"{purpose} in host memory"
        return self._memory.allocate(name, nbytes, ArenaKind.HOST, zeroed=False)

    def _record(self, bound: BoundStep[Allocation]) -> Recording:
        runtime = self._runtime
        launches = launches_of(
            runtime.program.kernels,
            bound.step.ops,
            bound.schedule.op_schedules,
            max_groups(self.device),
        )
        packets = Packets(bound.packets, bound.stored.address)
        return Recording(runtime.queue, runtime.program, runtime.addresses, launches, packets)

    def _discard(self, launch: Recording) -> None:
        launch.close()

    def _forget_inputs(self) -> Allocation | None:
        inputs, self._submissions.input_memory = self._submissions.input_memory, None
        return inputs

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        addresses = self._runtime.addresses
        scratch = self._scratch_of(shared)
        addresses.move(scratch.address, addresses.inputs)
        input_memory = self._grown("inputs of a step", self._submissions.input_memory, inputs)
        self._submissions.input_memory = input_memory
        addresses.move(scratch.address, input_memory.address)

    def _until_done(
        self, fence: StepFence[Allocation, Recording, VulkanStep], seconds: float
    ) -> bool:
        return self._runtime.queue.wait(fence.completion.handle, seconds) and fence.done

    def _shut_down(self) -> None:
        try:
            if not self._lost:
                self._runtime.queue.finish()
                self._submissions.close()
        finally:
            self._runtime.close(bool(self._lost))


def device_lines() -> tuple[str, ...]:
    """A line for every device: driver, memory, features, and which kernels it runs. Raises
    TierUnavailable if there is no loader or no device."""
    vulkan = load_vulkan()
    with Instance(vulkan) as instance:
        devices = instance.devices()
    return tuple(_line(device) for device in devices)


def _line(device: Device) -> str:
    memory = f"{device.memory_bytes // MEBIBYTE:,} MiB{' shared' if device.host_unified else ''}"
    version = f"Vulkan {device.version[0]}.{device.version[1]}"
    about = f"{device.name}: {device.driver}, {version}, {memory}"
    if not device.missing:
        about += f"; {', '.join(device.features) or 'no optional features'}"
    return device_line(about, device.missing, lambda: VulkanTier(device.name, Choices()))
