"""Has the worker pool check stored matrices and arrange them as the products read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np

from accel.native.names import ARRANGE, FINITE
from accel.native.pool import RING_STEPS, Job, WorkerPool
from accel.packets.buffers import ArrangedMatrix
from accel.packets.host_memory import AddressRange, SharedMemory
from accel.packets.layouts import LANES, WeightLayout, group_bytes
from accel.packets.packet import PACKET
from accel.packets.stacks import Stack
from contract.arrays import Bytes, Records
from contract.dtypes import DType, StorageClass
from contract.lazy_dataclass import dataclass
from contract.tier import FiniteWords

MAX_AHEAD = RING_STEPS // 2
"""Most jobs of the pool that wait while the host prepares the next one."""
MAX_AHEAD_BYTES = 1 << 23
"""Most stored bytes of these jobs: they stay in memory until the host, which may be late, has seen
that the job has ended."""

Packets = Records


def stack_of(dtype: DType, data: Bytes, matrices: int) -> Stack | None:
    """Stored rows uint8[rows, row_bytes] as matrices to arrange; None for floats, which the
    products read as stored."""
    if dtype.storage is StorageClass.FLOAT:
        return None
    return Stack(dtype, np.ascontiguousarray(data), len(data) // matrices, LANES)


def stack_bytes(stack: Stack) -> int:
    """Bytes of the arranged matrices."""
    return stack.groups * group_bytes(stack.dtype, stack.columns)


def arranged(stack: Stack, memory: AddressRange) -> ArrangedMatrix[AddressRange]:
    """The matrices of ``stack`` arranged in ``memory``, now or when the pool has done it."""
    row_bytes = group_bytes(stack.dtype, stack.columns)
    return ArrangedMatrix(memory, row_bytes, WeightLayout.LANES)


def arrange_packets(stack: Stack, address: int) -> Packets:
    """The packet that writes the arranged matrices to ``address``."""
    packets = np.zeros(1, PACKET)
    packets["op"] = ARRANGE
    packets["dtype"] = stack.dtype.ggml_id
    packets["size"][0, :4] = stack.groups, stack.rows, stack.columns, 0
    packets["operand"][0, :2] = stack.data.ctypes.data, address
    return packets


def finite_packets(data: Bytes, finite: FiniteWords, flag: int) -> Packets:
    """The packet that sets the 32-bit word at ``flag`` to 1 when a scale in ``data`` is not
    finite."""
    packets = np.zeros(1, PACKET)
    packets["op"] = FINITE
    packets["operand"][0, :3] = data.ctypes.data, flag, data.nbytes // finite.block_bytes
    words = finite.offsets
    form = (finite.block_bytes, finite.word_bytes, finite.exponent, len(words), *words)
    packets["stride"][0, : len(form)] = form
    return packets


@dataclass(slots=True)
class Arranger:
    """Runs packets that check and arrange weights, a few jobs ahead of the host.

    ``_in_flight`` has, of each job, its number, its stored bytes, the memory it reads and writes,
    and what is called at its end."""

    memory: SharedMemory
    pool: WorkerPool
    _in_flight: deque[tuple[int, int, Any, Callable[[], None]]] = field(default_factory=deque)

    def upload(
        self, name: str, dtype: DType, data: Bytes, matrices: int
    ) -> ArrangedMatrix[AddressRange]:
        """Begin to arrange ``data``, uint8[rows, row_bytes] of ``matrices`` one below the other,
        and return where the result will lie. Floats stay where they are.

        Steps that are submitted later find it complete; other readers call ``finish`` first.
        Raises OutOfMemory naming the buffer."""
        stack = stack_of(dtype, data, matrices)
        if stack is None:
            stored = self.memory.adopt(name, data, borrowed=True)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        memory = self.memory.allocate(name, stack_bytes(stack), zeroed=False)
        used = stack.data, memory.host
        self.run(arrange_packets(stack, memory.address), stack.data.nbytes, used)
        return arranged(stack, memory)

    def run(
        self, packets: Packets, stored: int, used: Any, at_end: Callable[[], None] = lambda: None
    ) -> None:
        """Submit packets that read ``stored`` bytes. ``used`` holds the memory that they use. When
        they have run ``at_end`` is called, by this or a later call of ``run`` or ``finish``."""
        while self._in_flight and (
            self.pool.done(self._in_flight[0][0])
            or len(self._in_flight) > MAX_AHEAD
            or self._stored_bytes + stored > MAX_AHEAD_BYTES
        ):
            self._finish_oldest()
        job = Job(packets=packets.ctypes.data, count=len(packets), workers=self.pool.workers)
        self._in_flight.append((self.pool.submit(job), stored, (packets, used), at_end))

    def finish(self) -> None:
        """Wait until every job has ended."""
        while self._in_flight:
            self._finish_oldest()

    @property
    def _stored_bytes(self) -> int:
        return sum(stored for _, stored, _, _ in self._in_flight)

    def _finish_oldest(self) -> None:
        number, _, _, at_end = self._in_flight[0]
        while not self.pool.wait(number, 1.0):
            pass
        self._in_flight.popleft()
        at_end()
