"""The packets of a bucket as command buffers, recorded once and submitted for every step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.kernels.launches import MOST_GROUPS, PlannedLaunch
from accel.kernels.source import ALL_OPS, Module, Traits
from accel.packets import work
from accel.packets.step_memory import StepAddresses
from accel.vulkan.device import Device
from accel.vulkan.memory import Memory
from accel.vulkan.program import Pipeline, Program
from accel.vulkan.pushed import Packets, pushed
from accel.vulkan.queue import Queue

MOST_GROUPS_OF_A_CPU = 64
MATRIX_SPEED = 16
"""The factor by which matrix units multiply faster."""


def most_groups(device: Device) -> int:
    """Most work-groups of a launch; each takes several units of work in turn."""
    return MOST_GROUPS_OF_A_CPU if device.is_cpu else min(MOST_GROUPS, device.most_groups)


class Recording:
    """The command buffers of a bucket, recorded again when memory they name has moved."""

    def __init__(
        self,
        queue: Queue,
        program: Program,
        addresses: StepAddresses,
        launches: list[PlannedLaunch[Pipeline]],
        packets: Packets,
    ) -> None:
        self._queue = queue
        self._layout = program.layout
        self._addresses = addresses
        self._launches = launches
        self._batch_work = work.BATCH_WORK * (MATRIX_SPEED if program.traits.matrix else 1)
        self._packets = packets
        self._batches: list[Any] = []
        self._version = -1
        self._stage = queue.vulkan.flags("SHADER_STAGE", "COMPUTE")
        self._bind = queue.vulkan.constant("PIPELINE_BIND_POINT_COMPUTE")

    @property
    def batches(self) -> list[Any]:
        """The command buffers to submit, in order."""
        if self._version != self._addresses.version:
            if self._batches:
                self._queue.finish()
                self.close()
            works = [launch.work for launch in self._launches]
            waits = [launch.wait for launch in self._launches]
            runs = work.cut(works, self._batch_work, waits)
            self._batches = [self._record(run, run.stop) for run in runs]
            self._version = self._addresses.version
        return self._batches

    def close(self) -> None:
        """Free the command buffers, which must not be running."""
        self._queue.forget(self._batches)
        self._batches = []

    def _record(self, run: range, stop: int) -> Any:
        first = run.start == 0
        last = stop == len(self._launches)

        def fill(commands: Any) -> None:
            if first:
                self._queue.barrier(commands)
            bound = None
            for index in run:
                launch = self._launches[index]
                if launch.wait and index:
                    self._queue.level_barrier(commands)
                if launch.kernel is not bound:
                    self._bind_pipeline(commands, launch.kernel)
                    bound = launch.kernel
                self._dispatch(commands, index, launch)
            if last:
                self._queue.barrier(commands)

        return self._queue.record(fill)

    def _bind_pipeline(self, commands: Any, pipeline: Pipeline) -> None:
        self._queue.vulkan.run("CmdBindPipeline", commands, self._bind, pipeline.handle)

    def _dispatch(self, commands: Any, index: int, launch: PlannedLaunch[Pipeline]) -> None:
        vulkan = self._queue.vulkan
        data = vulkan.ffi.from_buffer(pushed(launch.op, self._packets, index, self._addresses))
        vulkan.run("CmdPushConstants", commands, self._layout, self._stage, 0, len(data), data)
        vulkan.run("CmdDispatch", commands, launch.groups, 1, 1)


def launch_packet(
    memory: Memory,
    program: Program,
    module: Module,
    packet: NDArray[np.void],
    groups: int,
    traits: Traits | None = None,
) -> None:
    """Run the kernel of a module with PACKET[1] outside of any step, and wait for it."""
    pipeline = program.kernel(module, traits)
    stored = memory.adopt("packet", packet.view(np.uint8))
    queue, vulkan = memory.queue, memory.queue.vulkan
    stage = vulkan.flags("SHADER_STAGE", "COMPUTE")
    given = pushed(ALL_OPS[module.op], Packets(packet, stored.address), 0, StepAddresses())

    def fill(commands: object) -> None:
        point = vulkan.constant("PIPELINE_BIND_POINT_COMPUTE")
        vulkan.run("CmdBindPipeline", commands, point, pipeline.handle)
        data = vulkan.ffi.from_buffer(given)
        vulkan.run("CmdPushConstants", commands, program.layout, stage, 0, len(given), data)
        vulkan.run("CmdDispatch", commands, groups, 1, 1)

    queue.await_number(queue.run_once(fill))
    memory.free(stored)
