"""Steps in flight on one device; each has a copy of its inputs in host memory, its snapshot.

If the device reads host memory, a step reads its snapshot directly. Otherwise the queue copies the
snapshot to the device buffer from which all steps read their inputs. The queue also copies each
requested output out before the next step overwrites it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from accel.opencl.launcher import LaunchContext, Recording
from accel.opencl.memory import BankedMemory
from accel.packets.host_memory import AddressRange, aligned_bytes
from accel.packets.staging_buffers import Bytes
from accel.packets.submissions import HostSlot, LoweredBatch, Submissions
from contract.ir.inputs import InputCopy
from contract.lazy_dataclass import dataclass

COPYING_ITEMS = 16
"""Work-items that copy an output; few, because a processor runs each on a core."""


@dataclass(frozen=True, slots=True)
class OpenClStep:
    """An enqueued step. ``event`` is the last of ``events``, those of its copies included.

    Events that are deleted wait for their commands. ``complete`` is the status at the end."""

    event: Any
    events: list[Any]
    complete: int

    def ended(self) -> bool:
        return bool(self.event.command_execution_status <= self.complete)

    def collect(self) -> None:
        """Do nothing: the device has copied the outputs (see Completion)."""


class OpenClSubmissions(Submissions[AddressRange, Recording, HostSlot, OpenClStep]):
    """See Submissions. ``input`` is the buffer for inputs on a device with its own memory."""

    def __init__(self, launch: LaunchContext) -> None:
        super().__init__()
        self._context = launch
        self._complete = launch.cl.COMPLETE
        shared = launch.memory.shared
        self._copy = launch.cl.Kernel(launch.program, "copy_output") if shared else None
        self.input: AddressRange | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in all snapshots."""
        held = sum(slot.inputs.data.nbytes for _, slot in self._in_flight)
        return held + sum(nbytes * len(free) for nbytes, free in self._free.items())

    def _new_slot(self, batch: LoweredBatch[AddressRange, Recording]) -> HostSlot:
        return HostSlot(InputCopy(aligned_bytes(batch.input_bytes)))

    def _launch(
        self,
        batch: LoweredBatch[AddressRange, Recording],
        slot: HostSlot,
        outputs: Mapping[str, Bytes],
    ) -> OpenClStep:
        memory, snapshot = self._context.memory, slot.inputs.data
        # Writes of the host to mapped memory count only when no step is in flight.
        sent = [] if self._in_flight else memory.to_device()
        inputs = self._provided(snapshot, sent)
        done = [batch.launch.enqueue(inputs, self._step.tokens)]
        for name, data in outputs.items():
            if data.nbytes:
                done.append(self._copied(batch.outputs[name][1], data))
        done += memory.to_host()
        self._context.queue.flush()
        return OpenClStep(done[-1], sent + done, self._complete)

    def _provided(self, snapshot: Bytes, sent: list[Any]) -> int:
        """The address from which the next step reads its inputs."""
        memory = self._context.memory
        if not isinstance(memory, BankedMemory):
            return int(snapshot.ctypes.data)
        assert self.input is not None
        sent.append(memory.transfer(self.input, snapshot, to_device=True))
        return self.input.address

    def _copied(self, allocation: AddressRange, data: Bytes) -> Any:
        """Enqueue the copy of an output; returns its event."""
        launch = self._context
        if isinstance(launch.memory, BankedMemory):
            return launch.memory.transfer(allocation, data, to_device=False)
        assert self._copy is not None
        addresses = np.uint64(allocation.address), np.uint64(data.ctypes.data)
        self._copy.set_args(*addresses, np.uint64(data.nbytes // 4))
        size = (COPYING_ITEMS,)
        return launch.cl.enqueue_nd_range_kernel(launch.queue, self._copy, size, None)
