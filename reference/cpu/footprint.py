"""The memory a graph needs on the CPU tier: buffers, prepared weights, scratch, attention's
copies."""

from __future__ import annotations

import math
from functools import cache

from contract.arithmetic import KV_TILE, PAGE_TOKENS
from contract.dtypes import F32, DType
from contract.footprint import Footprint, owns_upload
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes, plan_scratch
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.cpu.kernels import PREPARED, PREPARED_EXPERTS
from reference.cpu.prepared import expert_memory_limit
from reference.cpu.weights import TILE_ROWS, prepared_bytes

THREAD_BYTES = 4 << 20
"""Bytes of the intermediate arrays of ``reference.cpu.segments`` that each thread keeps, except the
one that holds a span of every token."""
ACTIVATION_BYTES = 32
"""Bytes per element of a product's input, for all forms ``PreparedActivation`` has of it."""

INTEGER_BYTES = 4
"""Bytes per channel of a position: its key and its value, int16 each."""
ROW_BYTES = 12
"""Bytes per position and KV head: three binary32 numbers."""
BLOCK_BYTES = 7 << 20
"""Bytes of the arrays of one block of attention: scores, weights, keys and values in binary64."""

ATTENTION = (Opcode.FLASH_ATTN, Opcode.FLASH_ATTN_BATCHED)


def cpu_footprint(
    graph: Graph, largest: ShapeKey, kernels: frozenset[Opcode], threads: int
) -> Footprint:
    """The bytes the tier allocates; ``kernels`` are the opcodes that run a fast kernel.

    A prepared weight replaces the stored one, which only EMBED and definitions still read. Prepared
    experts are additional to the stored ones, since they may be dropped and prepared again."""
    prepared, stored = _uses_of_weights(graph, kernels)
    experts = _expert_bytes(graph, kernels)
    buffers: dict[str, int] = {}
    mapped: dict[str, int] = {}
    for decl in graph.buffers.values():
        if decl.kind is BufferKind.SCRATCH:
            continue
        nbytes = buffer_bytes(decl, largest)
        buffers[decl.name] = nbytes if owns_upload(decl) else 0
        if decl.kind is BufferKind.WEIGHT:
            if decl.name in prepared:
                buffers[decl.name] += _prepared_bytes(decl)
            buffers[decl.name] += experts.get(decl.name, 0)
            if decl.name in stored and not owns_upload(decl):
                mapped[decl.name] = nbytes
    return Footprint(
        buffers,
        mapped,
        scratch=plan_scratch(graph, largest).nbytes,
        workspace=_workspace(graph, largest, kernels, threads),
    )


def _expert_bytes(graph: Graph, kernels: frozenset[Opcode]) -> dict[str, int]:
    """The most bytes of each weight's prepared experts: all of them, or its share of the limit."""
    names = {
        node.operands[name].buffer
        for node in graph.nodes
        if node.opcode in kernels
        for name in PREPARED_EXPERTS.get(node.opcode, ())
    }
    whole = {name: _prepared_bytes(graph.buffers[name]) for name in names}
    total, limit = sum(whole.values()), expert_memory_limit()
    return {name: nbytes * min(total, limit) // total for name, nbytes in whole.items()}


def _uses_of_weights(graph: Graph, kernels: frozenset[Opcode]) -> tuple[set[str], set[str]]:
    """The names of the weights that kernels prepare, and of those that nodes read as stored."""
    prepared: set[str] = set()
    stored: set[str] = set()
    for node in graph.nodes:
        for name, view in node.operands.items():
            prepares = node.opcode in kernels and name in PREPARED.get(node.opcode, ())
            (prepared if prepares else stored).add(view.buffer)
    return prepared, stored


def _prepared_bytes(decl: BufferDecl) -> int:
    *rows, columns = (int(dim) for dim in decl.shape)
    return _cached_bytes(decl.dtype, math.prod(rows), columns)


@cache
def _cached_bytes(dtype: DType, rows: int, columns: int) -> int:
    return prepared_bytes(dtype, rows, columns)


def _workspace(graph: Graph, largest: ShapeKey, kernels: frozenset[Opcode], threads: int) -> int:
    """A bound on the bytes of attention or a product, the arrays that threads keep included."""
    of_threads = threads * (THREAD_BYTES + F32.row_bytes(largest.tokens * TILE_ROWS))
    longest = max(
        (
            int(graph.shape(node.operands[name])[-1])
            for node in graph.nodes
            if node.opcode in kernels
            for name in (*PREPARED.get(node.opcode, ()), *PREPARED_EXPERTS.get(node.opcode, ()))
        ),
        default=0,
    )
    product = ACTIVATION_BYTES * largest.tokens * longest
    return of_threads + max(product, _attention_workspace(graph, largest, kernels, threads))


def _attention_workspace(
    graph: Graph, largest: ShapeKey, kernels: frozenset[Opcode], threads: int
) -> int:
    """Bytes of the integers of keys and values of all slots of a step, and of each thread's arrays.

    The context is the page table's capacity."""
    needed = 0
    for node in graph.nodes:
        if node.opcode in ATTENTION and node.opcode in kernels:
            slots, slot_pages = (int(dim) for dim in graph.shape(node.operands["page_table"]))
            *_, kv_heads, head_dim = (int(n) for n in graph.shape(node.operands["kv"])[1:])
            positions = -(-slot_pages * PAGE_TOKENS // KV_TILE) * KV_TILE
            of_slot = positions * kv_heads * (ROW_BYTES + INTEGER_BYTES * head_dim)
            needed = max(needed, min(slots, largest.tokens) * of_slot + threads * BLOCK_BYTES)
    return needed
