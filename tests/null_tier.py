"""A tier that runs no arithmetic: every row of every step samples one token, and all else is zeros.

Engines and servers are tested on it where what matters is who runs when, not what is computed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.packets.buffers import DeviceBuffer, outputs_of
from accel.packets.submissions import HostSlot, LoweredBatch, Submissions
from accel.packets.tier import BaseTier, tier_info
from contract.footprint import Footprint, declared_footprint
from contract.ir.inputs import InputCopy, InputLayout
from contract.ir.nodes import BufferDecl, Graph
from contract.records import OUTPUT_EVENT
from contract.shape_key import ShapeKey

Bytes = NDArray[np.uint8]
MEMORY_BYTES = 1 << 40
RING = "output.ring"


@dataclass(frozen=True, slots=True, eq=False)
class NullAllocation:
    """Zeros of the host."""

    host: Bytes
    address: int = 0

    @property
    def nbytes(self) -> int:
        return self.host.nbytes


class NullMemory:
    """See ``accel.packets.tier.DeviceMemory``."""

    held, available = 0, MEMORY_BYTES

    def allocate(self, what: str, nbytes: int) -> NullAllocation:
        return NullAllocation(np.zeros(nbytes, np.uint8))

    def adopt(self, what: str, data: Bytes) -> NullAllocation:
        return NullAllocation(data.reshape(-1).view(np.uint8))

    def free(self, allocation: NullAllocation) -> None:
        """Python's own."""

    def map(self, allocation: NullAllocation) -> Bytes:
        return allocation.host

    def read(self, allocation: NullAllocation, offset: int, nbytes: int) -> Bytes:
        return allocation.host[offset : offset + nbytes].copy()

    def write(self, allocation: NullAllocation, offset: int, data: Bytes) -> None:
        allocation.host[offset : offset + data.nbytes] = data


class NullStep:
    """A step, which has ended before it began."""

    def ended(self) -> bool:
        return True

    def collect(self) -> None:
        """Outputs are filled when a step is submitted."""


class NullSubmissions(Submissions[NullAllocation, None, HostSlot, NullStep]):
    """See Submissions."""

    def _new_slot(self, batch: LoweredBatch[NullAllocation, None]) -> HostSlot:
        return HostSlot(InputCopy(np.empty(batch.input_bytes, np.uint8)))

    def _launch(
        self,
        batch: LoweredBatch[NullAllocation, None],
        slot: HostSlot,
        outputs: Mapping[str, Bytes],
    ) -> NullStep:
        for name, data in outputs.items():
            data[:] = batch.outputs[name][1].host[: data.nbytes]
        return NullStep()


class NullTier(BaseTier[NullAllocation, None, NullStep]):
    """See ``contract.tier.Tier``. Every row samples ``token``."""

    def __init__(self, token: int = 0) -> None:
        super().__init__(
            tier_info("null", "nothing", "", MEMORY_BYTES), NullMemory(), NullSubmissions()
        )
        self._token = token

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        return declared_footprint(graph, largest)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Steps share nothing."""

    def lower(
        self, graph: Graph, buffers: Mapping[str, DeviceBuffer[NullAllocation]], form: ShapeKey,
        inputs: InputLayout,
    ) -> LoweredBatch[NullAllocation, None]:  # fmt: skip
        outputs = outputs_of(graph, lambda name: self._stored(buffers[name]))
        return LoweredBatch(form, len(graph.nodes), None, inputs.nbytes, outputs)

    def _allocate(self, decl: BufferDecl, nbytes: int) -> NullAllocation:
        allocation = self._memory.allocate(decl.name, nbytes)
        if decl.name == RING:
            allocation.host.view(OUTPUT_EVENT)["token"] = self._token
        return allocation

    def _fill(self, buffer: DeviceBuffer[NullAllocation]) -> None:
        """Nothing reads an upload."""

    def _finish(self) -> None:
        """All has ended."""

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        yield

    def _shut_down(self) -> None:
        self._submissions.close()
