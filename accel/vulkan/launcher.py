"""The packets of a bucket as command buffers, recorded once and submitted for every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from accel.kernels.launches import MAX_GROUPS, PlannedLaunch
from accel.kernels.source import ALL_OPS, Module, Traits
from accel.packets import work
from accel.packets.step_memory import StepAddresses
from accel.vulkan.device import Device
from accel.vulkan.memory import Memory
from accel.vulkan.program import Pipeline, Program
from accel.vulkan.push_constants import Packets, push_constants
from accel.vulkan.queue import Queue
from contract.arrays import Records

MAX_GROUPS_OF_A_CPU = 64
MATRIX_SPEED = 16
"""A command buffer holds this factor more work on a device with matrix units."""


def max_groups(device: Device) -> int:
    """Most work-groups of a launch: an op with more units of work gives each group several."""
    return MAX_GROUPS_OF_A_CPU if device.is_cpu else min(MAX_GROUPS, device.max_groups)


class Recording:
    """The command buffers of a shape bucket. Their push constants contain addresses, so that they
    are recorded again when scratch or inputs have moved."""

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

    @property
    def batches(self) -> list[Any]:
        """The command buffers of a step, in order of submission; records them if necessary."""
        if self._version != self._addresses.version:
            if self._batches:
                self._queue.finish()
                self.close()
            works = [launch.work for launch in self._launches]
            waits = [launch.wait for launch in self._launches]
            runs = work.split_launches(works, self._batch_work, waits)
            self._batches = [self._record(run) for run in runs]
            self._version = self._addresses.version
        return self._batches

    def close(self) -> None:
        """Free the command buffers, which must not be running."""
        self._queue.free(self._batches)
        self._batches = []

    def _record(self, run: range) -> Any:
        """One command buffer with the launches of ``run``; the first and the last buffer of a step
        also order it after the step before and before the next."""
        queue = self._queue

        def fill(commands: Any) -> None:
            if run.start == 0:
                queue.barrier(commands)
            bound = None
            for index in run:
                launch = self._launches[index]
                if launch.wait and index:
                    queue.level_barrier(commands)
                if launch.kernel is not bound:
                    queue.bind(commands, launch.kernel.handle)
                    bound = launch.kernel
                constants = push_constants(launch.op, self._packets, index, self._addresses)
                queue.dispatch(commands, self._layout, constants, launch.groups)
            if run.stop == len(self._launches):
                queue.barrier(commands)

        return queue.record(fill)


def launch_packet(
    memory: Memory,
    program: Program,
    module: Module,
    packet: Records,
    groups: int,
    traits: Traits | None = None,
) -> None:
    """Run the kernel of ``module`` outside of any step, with ``groups`` work-groups, and wait for
    its end. ``packet`` is PACKET[1]; without ``traits`` the kernel is that of ``program``."""
    pipeline = program.kernel(module, traits)
    stored = memory.adopt("packet", packet.view(np.uint8))
    queue, packets = memory.queue, Packets(packet, stored.address)
    constants = push_constants(ALL_OPS[module.op], packets, 0, StepAddresses())

    def fill(commands: Any) -> None:
        queue.bind(commands, pipeline.handle)
        queue.dispatch(commands, program.layout, constants, groups)

    queue.await_number(queue.run_once(fill))
    memory.free(stored)
