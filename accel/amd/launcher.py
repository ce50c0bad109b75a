"""Launches as packets: those of a bucket as an indirect buffer that every step executes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accel.amd import pm4
from accel.amd.device import Device
from accel.amd.program import LoadedKernel
from accel.amd.queue import Queue
from accel.kernels.launches import PlannedLaunch
from accel.packets.packet import PACKET, aligned
from accel.packets.step_memory import StepAddresses
from contract.arrays import Records
from contract.ir.inputs import InputCopy
from contract.records import record

ARGUMENTS = record("u8 scratch inputs packets, u4 index groups")
"""The arguments of ``KERNEL`` of ``accel/kernels/amd.h``."""
ALONE_SECONDS = 600.0
"""Longest duration of a launch outside of a step."""
GUARDED_LEVELS = 8
"""Levels of launches, about a layer, between two checks of the word that cancels; each check reads
over the bus."""
GUARDED_WORDS = pm4.MAX_CONDITIONAL_WORDS // 2


class Recording:
    """The launches of a bucket, with memory for the inputs of one step.

    ``number`` is its last submission, ``go`` the address of a word that cancels the launches not
    begun once it is 0. The memory has arguments, inputs and indirect buffer, in this order."""

    def __init__(
        self,
        device: Device,
        name: str,
        launches: Sequence[PlannedLaunch[LoadedKernel]],
        packets: int,
        input_bytes: int,
        go: int,
    ) -> None:
        self._device = device
        self._go = go
        self._caches = device.generation.caches
        self._launches = launches
        self._packets = packets
        self._inputs_at = aligned(len(launches) * ARGUMENTS.itemsize)
        self._words_at = self._inputs_at + aligned(input_bytes)
        words = self._words(0)
        nbytes = self._words_at + 4 * len(words)
        self.allocation = device.allocate(f"launches of {name}", nbytes, device=False)
        inputs = self.allocation.host[self._inputs_at : self._inputs_at + input_bytes]
        self.inputs = InputCopy(inputs)
        self.buffer = self.allocation.address + self._words_at
        self.length = len(words)
        self.number = 0
        words = self._words(self.allocation.address)
        self.allocation.host[self._words_at :].view(np.uint32)[:] = words
        self._bound_to = -1

    def bind(self, addresses: StepAddresses) -> None:
        """Write the address of the scratch memory into the arguments if it has moved; nothing of
        this recording may be running."""
        if addresses.version == self._bound_to:
            return
        self._bound_to = addresses.version
        arguments = np.zeros(len(self._launches), ARGUMENTS)
        arguments["scratch"] = addresses.scratch
        arguments["inputs"] = self.allocation.address + self._inputs_at
        arguments["packets"] = self._packets
        arguments["index"] = np.arange(len(self._launches))
        arguments["groups"] = [launch.groups for launch in self._launches]
        self.allocation.host[: arguments.nbytes] = arguments.view(np.uint8)

    def close(self) -> None:
        """Free the memory, which must not be in use."""
        self._device.free(self.allocation)

    def _words(self, arguments: int) -> pm4.Words:
        writer = pm4.Writer()
        # The previous step reads its inputs, and shared memory, until it has ended.
        writer.put(pm4.wait_for_launches())
        writer.put(pm4.acquire_memory(self._caches.acquire_all))
        first, levels = len(writer.words), 0
        for n, launch in enumerate(self._launches):
            waits = launch.wait and n > 0
            levels += waits
            if (waits and levels % GUARDED_LEVELS == 0) or len(
                writer.words
            ) > first + GUARDED_WORDS:
                first = writer.guard(first, self._go)
            if waits:
                writer.put(pm4.wait_for_launches())
                writer.put(pm4.acquire_memory(self._caches.acquire_level))
            address = arguments + n * ARGUMENTS.itemsize
            writer.dispatch(dispatch_of(launch.kernel, address, launch.groups))
        writer.guard(first, self._go)
        return writer.words


def dispatch_of(kernel: LoadedKernel, arguments: int, groups: int) -> pm4.Dispatch:
    """The register values of a launch."""
    header = kernel.header
    rsrc = header.rsrc1, header.rsrc2, header.rsrc3
    code = kernel.allocation.address + header.entry_offset
    return pm4.Dispatch(code, arguments, rsrc, header.workgroup_size[0], groups)


def launch_packet(
    device: Device, queue: Queue, kernel: LoadedKernel, packet: Records, groups: int
) -> None:
    """Run a kernel with PACKET[1] outside of any step, and wait for it. Raises
    DeviceLost."""
    block = device.allocate("packet", aligned(ARGUMENTS.itemsize) + PACKET.itemsize, device=False)
    at = aligned(ARGUMENTS.itemsize)
    block.host[at:] = packet.view(np.uint8)
    arguments = np.zeros(1, ARGUMENTS)
    arguments["packets"] = block.address + at
    arguments["groups"] = groups
    block.host[: ARGUMENTS.itemsize] = arguments.view(np.uint8)
    writer = pm4.Writer()
    writer.put(queue.acquire())
    writer.dispatch(dispatch_of(kernel, block.address, groups))
    queue.wait(queue.submit(writer.words), ALONE_SECONDS)
    device.free(block)
