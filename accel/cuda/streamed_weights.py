"""Weights that stay in page-locked host memory, and the ring of device memory for their copies.

Every step copies dense weights to the ring. A step of few tokens reads only some matrices of a
stack of experts: its kernels read them from host memory over the link, or from the expert cache on
the device. Longer steps copy the whole stack to the ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from accel.cuda.driver import Context
from accel.cuda.expert_cache import ExpertCache, StackShape, experts_held, make_expert_cache
from accel.cuda.memory import Allocation, HostWeight
from accel.cuda.packed_tiles import TUNED_STACKS
from accel.cuda.plan import STACK_KERNELS, PlannedLaunch
from accel.cuda.planning import LoweredBucket
from accel.cuda.runtime import Runtime
from accel.cuda.submissions import Mark
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.layouts import WeightLayout
from accel.packets.step import Step
from accel.packets.weight_ring import RING, WeightRing, ring_of, slot_turns, used_shares, with_ring
from contract.arrays import Bytes
from contract.footprint import Footprint
from contract.ir.nodes import BufferDecl, Graph
from contract.processors import processors

START = -1
"""The number that stands for the time before all launches."""


@dataclass(frozen=True, slots=True)
class LayerCopies:
    """The ``weights`` of a layer, which are copied once launch ``after`` has ended and before
    launch ``before`` begins."""

    weights: tuple[str, ...]
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A copy of ``host`` to an address in the ring."""

    address: int
    host: Bytes


def layer_copies(
    step: Step, launches: Sequence[PlannedLaunch], ring: WeightRing, names: Collection[str]
) -> list[LayerCopies]:
    """The copies of those weights among ``names`` that the step reads, in the order of layers."""
    reads: dict[str, tuple[int, int]] = {}
    for number, launch in enumerate(launches):
        for op in step.ops[launch.first : launch.first + launch.count]:
            for tensor in op.operands:
                if tensor is not None and tensor.buffer in names:
                    first, _ = reads.get(tensor.buffer, (number, number))
                    reads[tensor.buffer] = first, number
    return [
        LayerCopies(tuple(present), free, needed)
        for present, free, needed in slot_turns(ring, reads)
    ]


@dataclass(slots=True, eq=False)
class CopyStream:
    """Enqueues the copies of one step on ``stream`` while its launches are enqueued elsewhere.

    ``weights`` has the copy of each weight. Events are made at the first step and reused."""

    context: Context
    stream: Any
    layers: Sequence[LayerCopies]
    weights: Mapping[str, WeightCopy]
    _marks: dict[tuple[str, int], Mark] = field(default_factory=dict)

    def begin(self, steps: Any) -> None:
        """Enqueue the copies that wait for no launch of the step; ``steps`` is the stream of
        launches."""
        self.behind(START, steps)

    def before(self, number: int, steps: Any) -> bool:
        """Have launch ``number``, which is enqueued next, wait for the weights it is first to read;
        False if there are none."""
        needed = [index for index, layer in enumerate(self.layers) if layer.before == number]
        for index in needed:
            self._marks["copied", index].hold(steps)
        return bool(needed)

    def behind(self, number: int, steps: Any) -> None:
        """Enqueue the copies that wait for launch ``number``, which was enqueued last."""
        found = [index for index, layer in enumerate(self.layers) if layer.after == number]
        if not found:
            return
        self._mark("read", number, steps).hold(self.stream)
        for index in found:
            for copy in self._copies(index):
                self._copy(copy)
            self._mark("copied", index, self.stream)

    def _copies(self, index: int) -> Iterator[WeightCopy]:
        return (self.weights[name] for name in self.layers[index].weights)

    def _copy(self, copy: WeightCopy) -> None:
        here, nbytes = copy.host.ctypes.data, copy.host.nbytes
        self.context.call("cuMemcpyHtoDAsync", copy.address, here, nbytes, self.stream)

    def _mark(self, kind: str, number: int, stream: Any) -> Mark:
        """An event at the end of ``stream``."""
        mark = self._marks.get((kind, number))
        if mark is None:
            mark = self._marks[kind, number] = Mark(self.context, stream)
        else:
            mark.move(stream)
        return mark


LINK_BYTES = 64 << 20
LINK_COPIES = 3
"""The number of copies of LINK_BYTES bytes that measure the link; the fastest counts."""
LOCKERS = min(8, processors())
"""Threads that lock pages."""
MIN_READS = 2
"""A stack is copied whole if a step may read more than one in this many of its matrices."""

CudaBuffer = DeviceBuffer[Allocation]
Operand = tuple[int, int, WeightLayout]
"""The address, stride and layout that a packet contains."""


@dataclass(slots=True)
class StreamedWeights:
    """The streamed weights of one device."""

    runtime: Runtime
    ring: WeightRing | None = None
    cache: ExpertCache | None = None
    cache_bytes: int = 0
    _memory: Allocation | None = None
    _ahead: dict[str, Future[tuple[Bytes, int]]] = field(default_factory=dict)

    def holds(self, decl: BufferDecl) -> bool:
        """Whether the weight ``decl`` is streamed."""
        return self.ring is not None and self.ring.holds(decl)

    def of(self, graph: Graph) -> frozenset[str]:
        """The weights of ``graph`` that are streamed."""
        if self.ring is None:
            return frozenset()
        return frozenset(name for name, decl in graph.buffers.items() if self.ring.holds(decl))

    def footprint(self, graph: Graph, planned: Footprint) -> Footprint:
        """``planned`` with what streaming changes."""
        assert self.ring is not None
        return footprint_with(graph, planned, self.ring, self.cache_bytes)

    def choose(
        self,
        graph: Graph,
        names: Collection[str],
        nbytes_of: Callable[[BufferDecl], int],
        cache: int,
    ) -> None:
        """From now on stream ``names``, with ``cache`` bytes for experts on the device;
        ``nbytes_of`` returns the bytes of weights there. No step is running."""
        self.close()
        self.ring = ring_of(graph, names, nbytes_of) if names else None
        if self.cache is not None:
            self.cache.free()
        self.cache, self.cache_bytes = None, cache
        if self._memory is not None:
            self.runtime.memory.free(self._memory)
            self._memory = None

    def reserve(self) -> None:
        """Allocate the ring and begin to have pages locked. Raises OutOfMemory."""
        if self.ring is None or self._memory is not None:
            return
        self._memory = self.runtime.memory.allocate(RING, self.ring.nbytes)
        self.cache = make_expert_cache(
            self.runtime.memory, cached_stacks(self.ring), self.cache_bytes
        )
        pool, lock = ThreadPoolExecutor(LOCKERS, "lock pages"), self.runtime.memory.pinned.mapped
        self._ahead = {n: pool.submit(lock, n, size) for n, size in self.ring.sizes.items()}
        pool.shutdown(wait=False)

    def close(self) -> None:
        """Have no more pages locked, and return when no thread does."""
        for ahead in self._ahead.values():
            ahead.cancel()
        wait(self._ahead.values())
        self._ahead = {}

    def allocate(self, name: str, nbytes: int) -> HostWeight:
        """The memory of a streamed weight. Raises OutOfMemory."""
        assert self.ring is not None
        assert self._memory is not None
        ahead = self._ahead.pop(name, None)
        pinned = self.runtime.memory.pinned
        host, mapped = pinned.mapped(name, nbytes) if ahead is None else ahead.result()
        address = self._memory.address + self.ring.offsets[name]
        return HostWeight(address, nbytes, host, mapped=mapped)

    def zero_copy_operands(
        self,
        graph: Graph,
        lowered: LoweredBucket,
        matrix: Callable[[CudaBuffer], ArrangedMatrix[Allocation]],
        buffers: Mapping[str, CudaBuffer],
    ) -> dict[str, Operand]:
        """By name the stacks of which the step reads few matrices, and where its kernels read them:
        through a list of the experts' addresses, where all kernels that read the stack can use
        such lists, else in host memory."""
        found: dict[str, Operand] = {}
        for name in self._reads_few_rows(graph, lowered.step):
            _, stride, layout = matrix(buffers[name]).operand
            found[name] = _host_weight(matrix(buffers[name])).mapped, stride, layout
        if self.cache is not None:
            plain = _read_without_lists(lowered)
            for name in found.keys() - plain:
                address = self.cache.address(name)
                if address is not None:
                    found[name] = address, 0, found[name][2]
        return found

    def _reads_few_rows(self, graph: Graph, step: Step) -> list[str]:
        rows: dict[str, int] = {}
        for op in step.ops:
            for index in op.matrices:
                tensor = op.operands[index]
                if tensor is not None and self.holds(graph.buffers[tensor.buffer]):
                    rows[tensor.buffer] = max(rows.get(tensor.buffer, 0), op.count.maximum)
        decls = {name: graph.buffers[name] for name in rows}
        return [
            name
            for name, decl in decls.items()
            if len(decl.shape) == 3 and rows[name] * MIN_READS <= int(decl.shape[0])
        ]

    def fill(
        self,
        graph: Graph,
        matrix: Callable[[CudaBuffer], ArrangedMatrix[Allocation]],
        buffers: Mapping[str, CudaBuffer],
    ) -> None:
        """Enqueue the first copies to the cache of experts, unless that was done. A graph that does
        not have all stacks of the cache does not fill it."""
        cache = self.cache
        if cache is None or cache.matrices:
            return
        names = {stack.name for layer in cache.layers for stack in layer.stacks}
        if names <= self.of(graph):
            cache.fill({name: _host_weight(matrix(buffers[name])) for name in names})

    def advance(self) -> None:
        """Enqueue what the cache of experts has to do before the next step."""
        if self.cache is not None and self.cache.matrices:
            self.cache.advance()

    def copies(
        self, lowered: LoweredBucket, names: Collection[str], buffers: Mapping[str, CudaBuffer]
    ) -> CopyStream | None:
        """The copies of ``names`` in a step."""
        if self.ring is None or not names:
            return None
        layers = layer_copies(lowered.step, lowered.plan.launches, self.ring, names)
        weights = {}
        for layer in layers:
            for name in layer.weights:
                matrix = buffers[name].matrix
                assert matrix is not None
                assert matrix.allocation.host is not None
                weights[name] = WeightCopy(matrix.allocation.address, matrix.allocation.host)
        memory = self.runtime.memory
        return CopyStream(memory.context, memory.streams.weights, layers, weights)

    def link_rate(self) -> float:
        """Bytes a second from page-locked memory to the device, as measured now. Raises
        OutOfMemory."""
        memory = self.runtime.memory
        host = memory.pinned.take(LINK_BYTES)
        target = memory.allocate("measuring the link", LINK_BYTES, zeroed=False)
        seconds = []
        try:
            for _ in range(LINK_COPIES):
                memory.synchronize()
                begin = time.perf_counter()
                memory.transfer(target, host, True, 0).wait()
                seconds.append(time.perf_counter() - begin)
        finally:
            memory.free(target)
        return LINK_BYTES / max(min(seconds), 1e-9)


def _host_weight(matrix: ArrangedMatrix[Allocation]) -> HostWeight:
    assert isinstance(matrix.allocation, HostWeight)
    return matrix.allocation


def footprint_with(graph: Graph, planned: Footprint, ring: WeightRing, cache: int) -> Footprint:
    """``planned`` with the weights of ``ring`` in host memory and ``cache`` bytes for experts."""
    used = used_shares(graph).items()
    shares = {name: part for name, part in used if part * MIN_READS <= 1}
    layers = cached_stacks(ring)
    held = experts_held(layers, cache)
    for layer in layers:
        for stack in layer:
            shares[stack.name] = shares.get(stack.name, 1) * (1 - min(1, held / stack.experts))
    streamed = with_ring(planned, ring, shares)
    return replace(streamed, ring=streamed.ring + cache)


def cached_stacks(ring: WeightRing) -> list[list[StackShape]]:
    """The stacks of experts of each layer whose kernels can read lists of them. A stack with fewer
    matrices is one of heads, all of which every token uses."""
    layers = []
    for names in ring.layers:
        decls = [decl for name in names if len((decl := ring.decls[name]).shape) == 3]
        experts = max((int(decl.shape[0]) for decl in decls), default=0)
        stacks = [d for d in decls if int(d.shape[0]) == experts and d.dtype in TUNED_STACKS]
        layers.append([_shape(decl, ring.sizes[decl.name]) for decl in stacks])
    return [layer for layer in layers if layer]


def _shape(decl: BufferDecl, nbytes: int) -> StackShape:
    experts = int(decl.shape[0])
    return StackShape(decl.name, experts, nbytes // experts)


def _read_without_lists(lowered: LoweredBucket) -> set[str]:
    """The buffers read by a kernel that cannot use lists of experts."""
    ops = lowered.step.ops
    with_lists = {one.first for one in lowered.plan.launches if one.entry in STACK_KERNELS}
    return {
        tensor.buffer
        for launch in lowered.plan.launches
        if launch.first not in with_lists
        for op in ops[launch.first : launch.first + launch.count]
        for tensor in op.operands
        if tensor is not None
    }
