"""Steps under way on one device: what keeps the inputs and outputs of each its own.

A step's inputs are copied from its snapshot to the one place all steps read them from, and the
outputs that are wanted from where the step left them, both in the order of the queue: so no step
meets the bytes of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.vulkan.launcher import Recording
from accel.vulkan.memory import Allocation, Memory
from accel.vulkan.queue import Queue
from contract.ir.inputs import InputCopy, InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import check_bucket


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class VulkanBatch:
    """A form's packets in device memory and how to submit them.

    ``barriers`` is how often kernels wait for those before, ``input_bytes`` the size of a step's
    inputs, ``outputs`` where each OUTPUT buffer lies.
    """

    bucket: ShapeKey
    packets: int
    barriers: int
    recording: Recording
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A copy of a step's inputs, and what brings it to the ``place`` of the inputs."""

    data: Allocation
    place: Allocation
    copy: InputCopy
    commands: Any


@dataclass(slots=True, eq=False)
class VulkanFence:
    """Completion of one submission, whose batch lives until then."""

    batch: VulkanBatch
    number: int
    outputs: Mapping[str, NDArray[np.uint8]]
    _queue: Queue
    _kept: list[tuple[str, Allocation]]

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host."""
        if self._queue.reached(self.number):
            self.collect()
            return True
        return False

    def collect(self) -> list[Allocation]:
        """Fill the outputs of a step that has ended; the memory they were kept in."""
        for name, kept in self._kept:
            host = kept.host
            assert host is not None
            data = self.outputs[name]
            data[:] = host[: data.nbytes]
        given_back = [kept for _, kept in self._kept]
        self._kept = []
        return given_back


@dataclass(slots=True)
class _Running:
    fence: VulkanFence
    snapshot: _Snapshot
    kept: list[Allocation]


@dataclass(slots=True)
class _Sync:
    """Commands that bring what the host has mapped to the device or back."""

    version: int = -1
    commands: list[Any] = field(default_factory=list)


class Submissions:
    """All that was submitted and may still run. ``place`` is where steps read their inputs."""

    def __init__(self, queue: Queue, memory: Memory) -> None:
        self._queue = queue
        self._memory = memory
        self._running: deque[_Running] = deque()
        self._snapshots: dict[int, list[_Snapshot]] = {}
        self._kept: dict[int, list[Allocation]] = {}
        self._sending = _Sync()
        self._fetching = _Sync()
        self.place: Allocation | None = None

    def submit(
        self,
        batch: VulkanBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> VulkanFence:
        """See ``contract.tier.Tier.submit``."""
        step = step_of(inputs)
        check_bucket(batch.bucket, step)
        self._retire()
        recorded = batch.recording.batches
        # What the host wrote into mapped memory counts only if nothing was running.
        before = [] if self._running else self._sync(self._sending, to_device=True)
        snapshot = self._snapshot(batch.input_bytes)
        snapshot.copy.update(inputs, rows)
        after = self._sync(self._fetching, to_device=False)
        outputs, kept = self._outputs(batch, step, requested)
        copying = [self._queue.record(self._copies(batch, kept), once=True)] if kept else []
        batches = [[commands] for commands in recorded]
        batches[0] = [*before, snapshot.commands, *batches[0]]
        batches[-1] = [*batches[-1], *after, *copying]
        number = self._queue.submit(batches)
        for commands in copying:
            self._queue.free_after(number, commands)
        places = [(name, place) for name, place, _ in kept]
        fence = VulkanFence(batch, number, outputs, self._queue, places)
        self._running.append(_Running(fence, snapshot, [place for _, place in places]))
        return fence

    def close(self) -> None:
        """Forget everything, which must have ended."""
        self._running.clear()
        for snapshots in self._snapshots.values():
            self._queue.forget([snapshot.commands for snapshot in snapshots])
        self._snapshots.clear()
        self._kept.clear()

    def _retire(self) -> None:
        """What steps that have ended no longer need is free again."""
        while self._running and self._running[0].fence.done:
            ended = self._running.popleft()
            self._snapshots.setdefault(ended.snapshot.data.nbytes, []).append(ended.snapshot)
            for place in ended.kept:
                self._kept.setdefault(place.nbytes, []).append(place)

    def _snapshot(self, nbytes: int) -> _Snapshot:
        place = self.place
        assert place is not None
        free = self._snapshots.setdefault(nbytes, [])
        snapshot = free.pop() if free else None
        if snapshot is None or snapshot.place is not place:
            data = (
                snapshot.data
                if snapshot
                else self._memory.allocate("inputs of a step", nbytes, on_host=True)
            )
            if snapshot is not None:
                self._queue.forget([snapshot.commands])
            assert data.host is not None
            sent = self._queue.record(self._sent(data, place))
            snapshot = _Snapshot(data, place, InputCopy(data.host), sent)
        return snapshot

    def _sent(self, data: Allocation, place: Allocation) -> Any:
        """Records a copy that waits until the step before has read its inputs."""

        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            self._memory.record_copy(commands, data, 0, place, 0, data.nbytes)

        return fill

    def _sync(self, exchange: _Sync, to_device: bool) -> list[Any]:
        """The commands for what is mapped now, recorded when that has changed."""
        memory = self._memory
        if exchange.version != memory.exchanges:
            self._queue.finish()
            self._queue.forget(exchange.commands)
            mapped = memory.staging(to_device)
            exchange.commands = [self._queue.record(self._mirrored(mapped, to_device))]
            if not mapped:
                self._queue.forget(exchange.commands)
                exchange.commands = []
            exchange.version = memory.exchanges
        return exchange.commands

    def _mirrored(self, mapped: list[Allocation], to_device: bool) -> Any:
        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            for allocation in mapped:
                assert allocation.mirror is not None
                pair = allocation.mirror, allocation
                source, target = pair if to_device else pair[::-1]
                self._memory.record_copy(commands, source, 0, target, 0, allocation.nbytes)
            self._queue.barrier(commands)

        return fill

    def _outputs(
        self, batch: VulkanBatch, step: ShapeKey, requested: Sequence[str]
    ) -> tuple[dict[str, NDArray[np.uint8]], list[tuple[str, Allocation, int]]]:
        """Arrays for the rows ``step`` has of each output, and host memory they are copied to."""
        outputs, kept = {}, []
        for name in requested:
            decl, _ = batch.outputs[name]
            outputs[name] = np.empty(buffer_bytes(decl, step), np.uint8)
            if nbytes := outputs[name].nbytes:
                kept.append((name, self._keeping(nbytes), nbytes))
        return outputs, kept

    def _keeping(self, nbytes: int) -> Allocation:
        size = 1 << (nbytes - 1).bit_length()
        free = self._kept.setdefault(size, [])
        return (
            free.pop()
            if free
            else self._memory.allocate("outputs of a step", size, on_host=True, zeroed=False)
        )

    def _copies(self, batch: VulkanBatch, kept: list[tuple[str, Allocation, int]]) -> Any:
        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            for name, place, nbytes in kept:
                source = batch.outputs[name][1]
                self._memory.record_copy(commands, source, 0, place, 0, nbytes)
            self._queue.barrier(commands)

        return fill
