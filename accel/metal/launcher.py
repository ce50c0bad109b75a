"""The packets of a bucket as indirect commands, encoded once and executed for every step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from accel.kernels.launches import PlannedLaunch
from accel.metal.memory import Allocation, Memory
from accel.metal.program import Pipeline
from accel.metal.queue import READ_AND_WRITE, Queue
from accel.packets import work
from accel.packets.arenas import ArenaKind
from accel.packets.packet import PACKET, aligned
from accel.packets.step_memory import StepAddresses
from contract.arrays import Records
from contract.ir.inputs import InputCopy
from contract.records import record

ARGUMENTS = record("u8 scratch inputs packets, u4 index rest")
"""``LAUNCH`` of ``accel/kernels/msl.h``; its size is a multiple of Metal's alignment of
constants."""
CONCURRENT_DISPATCH = 1 << 5
"""MTLIndirectCommandTypeConcurrentDispatch."""
DESCRIPTOR_METHODS = (
    *("setCommandTypes:", "setInheritBuffers:", "setInheritPipelineState:"),
    "setMaxKernelBufferBindCount:",
)
COMMAND_METHODS = (
    *("setComputePipelineState:", "setKernelBuffer:offset:atIndex:", "setBarrier"),
    "concurrentDispatchThreadgroups:threadsPerThreadgroup:",
)
NO_GROUPS = (0, 0, 0)


class Recording:
    """The commands of a bucket, with memory for the inputs of one step; steps in flight never share
    one.

    The memory has the arguments of the launches, then the inputs."""

    def __init__(
        self,
        memory: Memory,
        name: str,
        launches: Sequence[PlannedLaunch[Pipeline]],
        packets: int,
        input_bytes: int,
    ) -> None:
        self._queue = memory.queue
        self._memory = memory
        self._launches = launches
        self._packets = packets
        self._inputs_at = aligned(len(launches) * ARGUMENTS.itemsize)
        self._scratch = -1
        self.runs = work.split_launches([launch.work for launch in launches], work.BATCH_WORK)
        self._pipelines = [
            list(dict.fromkeys(launches[index].kernel for index in run)) for run in self.runs
        ]
        self.allocation = memory.allocate(
            f"launches of {name}", self._inputs_at + input_bytes, ArenaKind.STEPS
        )
        try:
            self.commands = self._encoded()
        except BaseException:
            memory.free(self.allocation)
            raise
        self.inputs = InputCopy(self.allocation.host_view[self._inputs_at :])

    def bind(self, addresses: StepAddresses) -> None:
        """Write the address of the scratch memory into the arguments if it has moved; nothing of
        this recording may be running."""
        if addresses.scratch == self._scratch:
            return
        arguments = np.zeros(len(self._launches), ARGUMENTS)
        arguments["scratch"] = self._scratch = addresses.scratch
        arguments["inputs"] = self.allocation.address + self._inputs_at
        arguments["packets"] = self._packets
        arguments["index"] = np.arange(len(self._launches))
        self.allocation.host_view[: arguments.nbytes] = arguments.view(np.uint8)

    def execute(self, buffer: Any, number: int) -> None:
        """Encode run ``number`` of the commands."""
        objc, run = self._queue.objc, self.runs[number]
        with self._queue.encoding(buffer, "computeCommandEncoder") as encoder:
            resources = self._memory.resources
            objc.send(encoder, "useResources:count:usage:", *resources, READ_AND_WRITE)
            if self._queue.device.dispatches_pipelines:
                for pipeline in self._pipelines[number]:
                    dispatch(self._queue, encoder, pipeline, 0)
            if run:
                everything = (run.start, len(run))
                objc.send(encoder, "executeCommandsInBuffer:withRange:", self.commands, everything)

    def close(self) -> None:
        """Free commands and memory, which must not be in use."""
        self._queue.objc.release(self.commands)
        self._memory.free(self.allocation)

    def _encoded(self) -> Any:
        """The MTLIndirectCommandBuffer."""
        objc, device = self._queue.objc, self._queue.device.handle
        with ExitStack() as undo:
            undo.enter_context(objc.pool())
            descriptor = undo.enter_context(
                objc.owned(objc.new("MTLIndirectCommandBufferDescriptor"))
            )
            objc.check(descriptor, DESCRIPTOR_METHODS)
            objc.send(descriptor, "setCommandTypes:", CONCURRENT_DISPATCH)
            objc.send(descriptor, "setInheritBuffers:", False)
            objc.send(descriptor, "setInheritPipelineState:", False)
            objc.send(descriptor, "setMaxKernelBufferBindCount:", 1)
            selector = "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:"
            limit = max(1, len(self._launches))
            commands = objc.create("commands of a bucket", device, selector, descriptor, limit, 0)
            undo.callback(objc.release, commands)
            objc.check(commands, ("indirectComputeCommandAtIndex:",))
            for index, launch in enumerate(self._launches):
                selector = "indirectComputeCommandAtIndex:"
                command = objc.create("a command of a bucket", commands, selector, index)
                objc.check(command, COMMAND_METHODS)
                self._encode(command, index, launch)
            return objc.retain(commands)

    def _encode(self, command: Any, index: int, launch: PlannedLaunch[Pipeline]) -> None:
        send, arena = self._queue.objc.send, self.allocation.arena
        offset = self.allocation.offset + index * ARGUMENTS.itemsize
        send(command, "setComputePipelineState:", launch.kernel.handle)
        send(command, "setKernelBuffer:offset:atIndex:", arena.handle, offset, 0)
        selector = "concurrentDispatchThreadgroups:threadsPerThreadgroup:"
        send(command, selector, (launch.groups, 1, 1), (launch.kernel.items, 1, 1))
        if launch.wait and index:
            send(command, "setBarrier")


def dispatch(queue: Queue, encoder: Any, pipeline: Pipeline, groups: int) -> None:
    """Encode a dispatch of ``groups`` work-groups; none only makes the pipeline known."""
    send = queue.objc.send
    send(encoder, "setComputePipelineState:", pipeline.handle)
    grid = (groups, 1, 1) if groups else NO_GROUPS
    items = (pipeline.items, 1, 1) if groups else NO_GROUPS
    send(encoder, "dispatchThreadgroups:threadsPerThreadgroup:", grid, items)


def launch_packet(memory: Memory, pipeline: Pipeline, packet: Records, groups: int) -> None:
    """Run a kernel with PACKET[1] outside of any step, and wait for it. Raises DeviceLost."""
    queue = memory.queue
    at = aligned(ARGUMENTS.itemsize)
    block = memory.allocate("packet", at + PACKET.itemsize, ArenaKind.STEPS)
    try:
        arguments = np.zeros(1, ARGUMENTS)
        arguments["packets"] = block.address + at
        block.host_view[at:] = packet.view(np.uint8)
        block.host_view[: arguments.nbytes] = arguments.view(np.uint8)
        encode = partial(_launch_alone, memory, pipeline, block, groups)
        queue.await_end(queue.submit([encode]))
    finally:
        memory.free(block)


def _launch_alone(
    memory: Memory, pipeline: Pipeline, block: Allocation, groups: int, buffer: Any
) -> None:
    queue = memory.queue
    send = queue.objc.send
    with queue.encoding(buffer, "computeCommandEncoder") as encoder:
        send(encoder, "useResources:count:usage:", *memory.resources, READ_AND_WRITE)
        send(encoder, "setBuffer:offset:atIndex:", block.arena.handle, block.offset, 0)
        dispatch(queue, encoder, pipeline, groups)
