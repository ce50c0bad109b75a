"""The base of device tiers that can stream weights from host memory, see ``weight_ring.py``."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from accel.packets import weight_ring
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.footprint import PlannedSteps, StepMemory
from accel.packets.layouts import WeightLayout, planes_bytes
from accel.packets.packet import PACKET, aligned
from accel.packets.packet_tier import Arranger, PacketTier
from accel.packets.step import Step
from accel.packets.tier import A, C, L
from contract.arrays import Bytes
from contract.dtypes import F32, DType
from contract.errors import OutOfMemory
from contract.footprint import Footprint
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.unread_outputs import kinds_of_steps
from contract.shape_key import ShapeKey

LINK_BYTES = 16 << 20
"""Bytes of a copy that measures the rate of the link to the device."""
LINK_COPIES = 3


class StreamingArranger(Arranger[A], Protocol[A]):
    """Arranges matrices in memory of the device or of the host."""

    def upload(
        self,
        name: str,
        dtype: DType,
        data: Bytes,
        matrices: int,
        allocate: Callable[[str, int], A] | None = None,
        /,
    ) -> ArrangedMatrix[A]:
        """See Arranger. The memory comes from ``allocate``, if None from the device."""


class StreamingTier(PacketTier[A, L, C]):
    """See ``contract.tier.StreamsWeights``.

    Hooks that a tier implements in addition to those of PacketTier: ``streams``, ``_on_host`` and
    ``_forget_inputs``."""

    _arranger: StreamingArranger[A]
    _ring: weight_ring.WeightRing | None = None
    _ring_memory: A | None = None

    @property
    @abstractmethod
    def streams(self) -> bool:
        """Whether the device has its own memory, so that weights can stay in the host's."""

    def streamable(self, graph: Graph, largest: ShapeKey) -> Mapping[str, int]:
        stored = self._steps.memory(graph, largest).stored
        return weight_ring.streamable_weights(graph, stored, self._device_bytes)

    @property
    def caches_experts(self) -> bool:
        """See ``contract.tier.StreamsWeights``: steps copy whole stacks."""
        return False

    def streaming_footprint(
        self, graph: Graph, largest: ShapeKey, names: Collection[str], cache: int = 0
    ) -> Footprint:
        """See ``contract.tier.StreamsWeights``; ``stream`` has not been called."""
        resident = self.footprint(graph, largest)
        if not names:
            return resident
        copies = aligned(len(names) * PACKET.itemsize) * len(self.buckets(largest))
        more = replace(
            resident,
            scratch=self._streaming_scratch(resident.scratch),
            variants=resident.variants + copies * kinds_of_steps(graph),
        )
        return weight_ring.with_ring(more, weight_ring.ring_of(graph, names, self._device_bytes))

    def _streaming_scratch(self, nbytes: int) -> int:
        """At most the scratch of steps that copy weights, from that of steps that copy none."""
        return nbytes

    def stream(self, graph: Graph, names: Collection[str], cache: int = 0) -> None:
        self._ring = weight_ring.ring_of(graph, names, self._device_bytes) if names else None
        memory_cache = None if names else self._memory_cache
        self._steps = PlannedSteps(self._schedule, self.buckets, memory_cache)
        # What steps share may lie between weights, so it is allocated again with what follows.
        with self._guarded(weight_ring.RING):
            self._free_shared(self._ring_memory, self._own, self._forget_inputs())
        self._ring_memory = self._own = None

    def link_rate(self) -> float | None:
        decl = BufferDecl("link", BufferKind.STATE, F32, (LINK_BYTES // 4,))
        data = np.ones(LINK_BYTES, np.uint8)
        seconds = []
        try:
            buffer = self.alloc(decl, LINK_BYTES)
        except OutOfMemory:
            return None
        try:
            for _ in range(LINK_COPIES):
                begin = time.perf_counter()
                self.write(buffer, 0, data)
                self.read(buffer, 0, 4)
                seconds.append(time.perf_counter() - begin)
        finally:
            self.free(buffer)
        return LINK_BYTES / max(min(seconds), 1e-9)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Allocate what steps share and the ring, and announce the buffers that follow to the
        memory."""
        super().reserve(graph, largest)
        if self._ring is not None and self._ring_memory is None:
            with self._guarded(weight_ring.RING):
                self._expect_on_host(sum(map(aligned, self._ring.sizes.values())))
                # A copy of a single row reads its row number from the zeros after the slots.
                self._ring_memory = self._memory.allocate(weight_ring.RING, self._ring.nbytes)

    @abstractmethod
    def _forget_inputs(self) -> A | None:
        """Hook: the memory of step inputs, if any, which steps no longer use."""

    @abstractmethod
    def _on_host(self, purpose: str, nbytes: int) -> A:
        """Hook: host memory that the device reads and writes. Raises OutOfMemory naming
        ``purpose``."""

    def _expect_on_host(self, nbytes: int) -> None:
        """Hook: announce ``nbytes`` of ``_on_host`` in all."""

    def _arranged_bytes(self, decl: BufferDecl) -> int:
        """Hook: bytes of a matrix in the layout of products, 0 if it stays as stored."""
        return planes_bytes(decl)

    def _arrange(self, decl: BufferDecl, data: Bytes, matrices: int) -> ArrangedMatrix[A]:
        streamed = self._ring is not None and self._ring.holds(decl)
        return self._arranger.upload(
            decl.name, decl.dtype, data, matrices, self._on_host if streamed else None
        )

    def _planned(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        footprint = self._footprint(graph, largest, steps)
        ring = self._ring
        return (
            weight_ring.with_ring(footprint, ring)
            if ring is not None and self._streamed(graph)
            else footprint
        )

    def _streamed(self, graph: Graph) -> frozenset[str]:
        """The weights of ``graph`` that are streamed."""
        if self._ring is None:
            return frozenset()
        return frozenset(n for n, decl in graph.buffers.items() if self._ring.holds(decl))

    def _copying(self, graph: Graph, step: Step) -> tuple[Step, Step]:
        """``step`` with the copies of streamed weights, and the same as the schedule sees it."""
        names = self._streamed(graph)
        if not names or self._ring is None:
            return step, step
        copying = weight_ring.with_copies(step, self._ring, names)
        return copying, weight_ring.in_ring(copying, self._ring, names)

    def _address(self, name: str, buffers: Mapping[str, DeviceBuffer[A]]) -> int:
        if name == weight_ring.RING:
            assert self._ring_memory is not None
            return self._ring_memory.address
        if name.startswith(weight_ring.SOURCE):
            return buffers[name.removeprefix(weight_ring.SOURCE)].operand[0]
        return super()._address(name, buffers)

    def _operand(self, buffer: DeviceBuffer[A]) -> tuple[int, int, WeightLayout]:
        address, row_bytes, layout = super()._operand(buffer)
        if self._ring is not None and self._ring.holds(buffer.decl):
            assert self._ring_memory is not None
            address = self._ring_memory.address + self._ring.offsets[buffer.name]
        return address, row_bytes, layout

    def _device_bytes(self, decl: BufferDecl) -> int:
        """Bytes of a matrix on the device."""
        return weight_ring.bytes_of_matrix(decl, self._arranged_bytes)
