"""Copies of weights from host memory to a ring of device memory, as ops of the step that uses them.

A layer's weights that stay in host memory are copied to one of two slots of the ring while the
layer before computes from the other slot. The copies are ops like any other, so one schedule orders
them with the ops that read or overwrite their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from accel.packets.layouts import matrices_of
from accel.packets.ops import TABLE
from accel.packets.packet import ALIGNMENT, aligned
from accel.packets.step import Count, Op, Per, Step, Tensor
from contract.dtypes import StorageClass
from contract.footprint import Footprint
from contract.ir.nodes import BufferDecl, BufferKind, Graph, layer_of
from contract.lazy_dataclass import dataclass

RING = "ring of weights"
SOURCE = "in host memory: "
"""Prefix of the name of a weight's copy in host memory."""
SLOTS = 2
WORD_BYTES = 4
NO_SHARES: Mapping[str, float] = {}
PAIR_WORDS = 2
"""Words of the pair of row numbers that a copy of a single row reads: zeros after the slots."""


@dataclass(frozen=True, slots=True)
class WeightRing:
    """The streamed weights by layer in order of use, and the byte offset of each in the ring.

    ``sizes`` are their bytes, ``decls`` their declarations. Layers use the slots in turn."""

    layers: tuple[tuple[str, ...], ...]
    slot_bytes: int
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    decls: Mapping[str, BufferDecl]

    @property
    def slots_bytes(self) -> int:
        """Bytes of the used slots."""
        return self.slot_bytes * min(len(self.layers), SLOTS)

    @property
    def nbytes(self) -> int:
        """Bytes of the ring, including the pair of row numbers after the slots."""
        return self.slots_bytes + ALIGNMENT

    def holds(self, decl: BufferDecl) -> bool:
        """Whether the weight ``decl`` is streamed: another model may have one of the same name."""
        return self.decls.get(decl.name) == decl

    def tensor(self, name: str) -> Tensor:
        """The words of a weight in the ring."""
        words = self.sizes[name] // WORD_BYTES
        return Tensor(RING, self.offsets[name] // WORD_BYTES, words, words)


def ring_of(
    graph: Graph, names: Collection[str], nbytes_of: Callable[[BufferDecl], int]
) -> WeightRing:
    """The ring for the weights ``names`` of ``graph``; ``nbytes_of`` gives their device bytes."""
    layers: dict[int, list[str]] = {}
    for name, layer in weights_of_layers(graph).items():
        if name in names:
            layers.setdefault(layer, []).append(name)
    decls = {name: graph.buffers[name] for together in layers.values() for name in together}
    sizes = {name: nbytes_of(decl) for name, decl in decls.items()}
    inside: dict[str, int] = {}
    for together in layers.values():
        inside |= _consecutive(together, sizes)
    slot_bytes = max((inside[n] + aligned(sizes[n]) for n in inside), default=0)
    offsets = {
        name: index % SLOTS * slot_bytes + inside[name]
        for index, together in enumerate(layers.values())
        for name in together
    }
    return WeightRing(tuple(map(tuple, layers.values())), slot_bytes, offsets, sizes, decls)


def bytes_of_matrix(decl: BufferDecl, arranged: Callable[[BufferDecl], int]) -> int:
    """Bytes of a matrix on the device; ``arranged`` returns those of a quantized one."""
    if decl.dtype.storage is not StorageClass.FLOAT:
        return arranged(decl)
    *rows, columns = (int(dim) for dim in decl.shape)
    return math.prod(rows) * decl.dtype.row_bytes(columns)


def streamable_weights(
    graph: Graph, stored: Collection[str], nbytes_of: Callable[[BufferDecl], int]
) -> dict[str, int]:
    """Matrices of layers that ops read only in the layout of products, in order of use, and their
    bytes. ``stored`` are the buffers that some op reads as declared."""
    sizes = {
        name: nbytes_of(graph.buffers[name])
        for name in weights_of_layers(graph)
        if matrices_of(graph.buffers[name]) and name not in stored
    }
    return {name: nbytes for name, nbytes in sizes.items() if nbytes % WORD_BYTES == 0}


def weights_of_layers(graph: Graph) -> dict[str, int]:
    """The layer that first reads each weight, in order of use, without weights outside layers."""
    layers: dict[str, int] = {}
    for node in graph.nodes:
        layer = layer_of(node.name)
        for view in node.operands.values():
            is_weight = graph.buffers[view.buffer].kind is BufferKind.WEIGHT
            if is_weight and layer is not None:
                layers.setdefault(view.buffer, layer)
    return layers


def with_ring(
    footprint: Footprint, ring: WeightRing, shares: Mapping[str, float] = NO_SHARES
) -> Footprint:
    """``footprint`` with the ring on the device and its weights in host memory.

    ``shares`` are the parts of weights that a step of one token copies, 1 by default."""
    buffers = {**footprint.buffers, **dict.fromkeys(ring.sizes, 0)}
    in_host = sum(map(aligned, ring.sizes.values()))
    moved = sum(int(aligned(n) * shares.get(name, 1)) for name, n in ring.sizes.items())
    return replace(
        footprint, buffers=buffers, ring=aligned(ring.nbytes), streamed=in_host, moved=moved
    )


def used_shares(graph: Graph) -> dict[str, float]:
    """For each stack of experts, the part of its matrices that one token uses."""
    shares: dict[str, float] = {}
    for node in graph.nodes:
        ids = node.operands.get("ids")
        for view in node.operands.values() if ids is not None else ():
            decl = graph.buffers[view.buffer]
            if matrices_of(decl) > 1 and ids is not None:
                start, stop = ids.columns or (0, int(graph.buffers[ids.buffer].shape[-1]))
                shares[view.buffer] = (stop - start) / matrices_of(decl)
    return shares


def with_copies(step: Step, ring: WeightRing, names: Collection[str]) -> Step:
    """``step`` with the copies of those weights of ``names`` that it reads."""
    copies = dict[int, list[Op]]()
    for name, after in _copy_positions(step, ring, names):
        copies.setdefault(after, []).append(_copy(name, ring))
    ops = list(copies.get(-1, ()))
    for index, op in enumerate(step.ops):
        ops += [op, *copies.get(index, ())]
    return Step(ops, step.scratch)


def in_ring(step: Step, ring: WeightRing, names: Collection[str]) -> Step:
    """``step`` with the ring's bytes as operands instead of the weights that lie there, so that the
    schedule sees which ops touch the same bytes."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return (
            ring.tensor(tensor.buffer) if tensor is not None and tensor.buffer in names else tensor
        )

    ops = [replace(op, operands=tuple(map(moved, op.operands))) for op in step.ops]
    return Step(ops, step.scratch)


def _copy_positions(
    step: Step, ring: WeightRing, names: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yield each weight with the index of the op after which it is copied, -1 for the start.

    A layer's weights are copied one after each product of the layer before, so that copy and
    product overlap, and not before the last reader of the slot."""
    reads = _reads(step, names)
    before: list[int] = []
    for present, free, needed in slot_turns(ring, reads):
        for index, name in enumerate(present):
            after = before[min(index, len(before) - 1)] if before else -1
            yield name, min(max(free, after), needed - 1)
        before = sorted(reads[name][0] for name in present)


def slot_turns(
    ring: WeightRing, reads: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[list[str], int, int]]:
    """Yield, for each layer: its weights among ``reads``; the index that last reads the previous
    contents of its slot, -1 for none; and the index that first reads its weights.

    ``reads`` has the first and last index that read each weight. Raises ValueError if a layer is
    needed while its slot is in use."""
    last_reads: dict[int, int] = {}
    for layer in ring.layers:
        present = [name for name in layer if name in reads]
        if not present:
            continue
        slot = ring.offsets[present[0]] // ring.slot_bytes
        free, needed = last_reads.get(slot, -1), min(reads[name][0] for name in present)
        if free >= needed:
            raise ValueError(f"{present[0]} is needed while its slot of the ring is in use")
        yield present, free, needed
        last_reads[slot] = max(reads[name][1] for name in present)


def _reads(step: Step, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """The first and the last op that read each weight."""
    reads: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(step.ops):
        for tensor in op.operands:
            if tensor is not None and tensor.buffer in names:
                first, _ = reads.get(tensor.buffer, (index, index))
                reads[tensor.buffer] = first, index
    return reads


def _copy(name: str, ring: WeightRing) -> Op:
    """The op that copies a weight from host memory to the ring, as a single row."""
    device, target = TABLE["copy_rows"], ring.tensor(name)
    source = target._replace(buffer=SOURCE + name, start=0)
    pair = Tensor(RING, ring.slots_bytes // WORD_BYTES, PAIR_WORDS, PAIR_WORDS)
    operands = {"source": source, "pairs": pair, "target": target}
    return Op(
        device,
        tuple(operands[operand.name] for operand in device.operands),
        device.splits,
        Count(1, Per.STEP, 1),
        (target.columns,),
    )


def _consecutive(layer: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Byte offsets of a layer's weights in its slot."""
    offsets, stop = {}, 0
    for name in layer:
        offsets[name] = stop
        stop += aligned(sizes[name])
    return offsets
