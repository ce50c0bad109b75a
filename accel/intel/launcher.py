"""The packets of a bucket as command lists, recorded once and executed for every step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from accel.intel.memory import Memory
from accel.intel.program import LoadedKernel
from accel.intel.queue import Append, Events, Queue
from accel.kernels.launches import PlannedLaunch
from accel.packets import work
from accel.packets.arenas import ArenaKind
from accel.packets.step_memory import StepAddresses
from contract.arrays import Records
from contract.ir.inputs import InputCopy

COPIED, ENDED = 0, 1
"""The events of a step: its inputs are on the device; all its commands have ended."""


class Recording:
    """The command lists of a bucket, with memory for the inputs of one step and its events; steps
    in flight never share one.

    The host writes inputs to memory of its own. The immediate list copies them to the device, for
    which the first command list waits. The last list copies outputs and signals the end."""

    def __init__(
        self,
        memory: Memory,
        name: str,
        launches: Sequence[PlannedLaunch[LoadedKernel]],
        packets: int,
        input_bytes: int,
    ) -> None:
        queue = self._queue = memory.queue
        self._launches = launches
        self._packets = packets
        self._version = -1
        self.runs = work.split_launches([launch.work for launch in launches], work.BATCH_WORK)
        with ExitStack() as undo:
            purpose = f"inputs of {name}"
            self._host_inputs = memory.allocate(purpose, input_bytes, ArenaKind.HOST)
            undo.callback(memory.free, self._host_inputs)
            self._read = memory.allocate(purpose, input_bytes, ArenaKind.STEPS, zeroed=False)
            undo.callback(memory.free, self._read)
            self._lists = []
            for _ in (*self.runs, "end"):
                self._lists.append(queue.new_list())
                undo.callback(queue.zero.call, "CommandListDestroy", self._lists[-1])
            self.events = undo.enter_context(Events(queue, 2))
            self.inputs = InputCopy(self._host_inputs.host_view)
            self._undo = undo.pop_all()

    def bind(self, addresses: StepAddresses) -> None:
        """Record again if the scratch memory has moved; nothing of this may be running."""
        if self._version == addresses.version:
            return
        for number, run in enumerate(self.runs):
            self._reset(self._lists[number])
            with self._queue.recording(self._lists[number]) as append:
                if number == 0:
                    append("WaitOnEvents", 1, self.events.array(COPIED))
                append("Barrier", self._null, 0, self._null)
                for index in run:
                    self._launch(append, index, addresses.scratch, index > run.start)
        self._version = addresses.version

    def execute(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Start the step, and then ``copies``: source address, target address and bytes of each."""
        zero, cast = self._queue.zero, self._queue.zero.ffi.cast
        last = self._lists[-1]
        self._reset(last)
        with self._queue.recording(last) as append:
            append("Barrier", self._null, 0, self._null)
            for source, target, nbytes in copies:
                pointers = cast("void *", target), cast("void *", source)
                append("MemoryCopy", *pointers, nbytes, self._null, 0, self._null)
            append("Barrier", self.events.handles[ENDED], 0, self._null)
        for index in (COPIED, ENDED):
            self.events.reset(index)
        target, source = (cast("void *", one.address) for one in (self._read, self._host_inputs))
        signal = self.events.handles[COPIED], 0, self._null
        nbytes = self._host_inputs.nbytes
        immediate = self._queue.immediate
        zero.call("CommandListAppendMemoryCopy", immediate, target, source, nbytes, *signal)
        self._queue.submit(self._lists)

    def close(self) -> None:
        """Free lists, events and memory, which must not be in use."""
        self._undo.close()

    @property
    def _null(self) -> Any:
        return self._queue.zero.ffi.NULL

    def _reset(self, commands: Any) -> None:
        self._queue.zero.call("CommandListReset", commands)

    def _launch(self, append: Append, index: int, scratch: int, may_wait: bool) -> None:
        launch = self._launches[index]
        if launch.wait and may_wait:
            append("Barrier", self._null, 0, self._null)
        arguments = scratch, self._read.address, self._packets, index
        set_arguments(self._queue, launch.kernel, arguments)
        groups = self._queue.zero.ffi.new("ze_group_count_t *", (launch.groups, 1, 1))
        append("LaunchKernel", launch.kernel.handle, groups, self._null, 0, self._null)


def set_arguments(queue: Queue, kernel: LoadedKernel, arguments: tuple[int, int, int, int]) -> None:
    """Set the addresses of scratch, inputs and packets, and the index of the packet, of the next
    launch of a kernel."""
    zero = queue.zero
    for index, value in enumerate(arguments):
        kind = "uint32_t *" if index == 3 else "uint64_t *"
        data = zero.ffi.new(kind, value)
        size = zero.ffi.sizeof(kind[:-2])
        zero.call("KernelSetArgumentValue", kernel.handle, index, size, data)


def launch_packet(memory: Memory, kernel: LoadedKernel, packet: Records, groups: int) -> None:
    """Run a kernel with PACKET[1] outside of any step, and wait for it. Raises DeviceLost."""
    queue = memory.queue
    stored = memory.adopt("packet", packet.view(np.uint8))
    try:
        set_arguments(queue, kernel, (0, 0, stored.address, 0))
        count = queue.zero.ffi.new("ze_group_count_t *", (groups, 1, 1))
        queue.run("LaunchKernel", kernel.handle, count)
    finally:
        memory.free(stored)
