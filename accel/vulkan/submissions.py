"""Steps in flight on one device: each has a copy of its inputs in memory that the host can access.

In the order of the queue, the inputs are copied from there to the memory all steps read, and
requested outputs are copied from the memory the step wrote: so no step sees the bytes of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.packets.arenas import ArenaKind
from accel.packets.submissions import CopiedStep, LoweredBatch, OutputCopies, Submissions
from accel.vulkan.launcher import Recording
from accel.vulkan.memory import Allocation, Memory
from accel.vulkan.queue import Queue
from contract.ir.inputs import InputCopy


@dataclass(slots=True)
class VulkanSlot:
    """A copy of a step's inputs, and the commands that copy it to ``target``."""

    data: Allocation
    inputs: InputCopy
    target: Allocation | None = None
    commands: Any = None


@dataclass(frozen=True, slots=True)
class VulkanStep(CopiedStep[Allocation]):
    """A submitted step."""

    number: int


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
        outputs: Mapping[str, NDArray[np.uint8]],
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
        return VulkanStep(reached, outputs, copies, self._copies, number)

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
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> Any:
        def fill(commands: Any) -> None:
            self._queue.barrier(commands)
            for name, target in copies.items():
                source, nbytes = batch.outputs[name][1], outputs[name].nbytes
                self._memory.record_copy(commands, source, 0, target, 0, nbytes)
            self._queue.barrier(commands)

        return fill
