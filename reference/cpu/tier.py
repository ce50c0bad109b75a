"""The CPU tier: walks a lowered graph node by node, each a numpy function on bound arrays.

The oracle. Every opcode runs its definition from ``reference.ops``, except where
``reference.cpu.kernels`` has a faster function of the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from contract.arithmetic import ARITHMETIC_VERSION
from contract.dtypes import BF16, F16, F32, I12, I32, DType, StorageClass
from contract.errors import CodecError, OutOfMemory, UnsupportedOp
from contract.footprint import Footprint, owns_upload
from contract.ir.graph import BufferDecl, BufferKind, Graph, Node, View
from contract.ir.scratch import concrete_shape, plan_scratch
from contract.kernel import GpuTarget, KernelHeader, decode_kernel
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access
from contract.tier import Heap, TierInfo, check_range
from reference.cpu.footprint import cpu_footprint
from reference.cpu.kernels import fast_kernels
from reference.cpu.prepared import PreparedMatrices
from reference.cpu.threads import thread_count
from reference.exact.kv_storage import page_view
from reference.matrix import Matrix
from reference.ops import DEFINITIONS

NUMPY_DTYPES: Mapping[DType, np.dtype[Any]] = {
    F32: np.dtype("<f4"),
    F16: np.dtype("<f2"),
    BF16: np.dtype("<u2"),
    I32: np.dtype("<i4"),
}
"""Types whose elements numpy can address; the others exist as rows of bytes only."""

Bound = NDArray[Any] | Matrix


@dataclass(slots=True, eq=False)
class CpuBuffer:
    """Host memory holding one graph buffer: bytes, [rows, row_bytes] for an uploaded matrix.

    Bytes that are not ``owned`` are a view of the model file.
    """

    name: str
    nbytes: int
    heap: Heap
    data: NDArray[np.uint8]
    matrix: Matrix | None = None
    owned: bool = True


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """A kernel file whose code is the name of an opcode's numpy function."""

    header: KernelHeader
    opcode: Opcode


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """A list of calls. ``calls`` run in order; each reads and writes bound arrays."""

    key: ShapeKey
    calls: tuple[Callable[[], None], ...]
    nodes: tuple[Node, ...]
    operands: tuple[Mapping[str, Bound], ...]
    arena: NDArray[np.uint8]

    @property
    def packets(self) -> int:
        """Number of numpy kernels one submission runs."""
        return len(self.calls)


@dataclass(frozen=True, slots=True)
class CpuFence:
    """Submissions run to completion, so a fence is done when it exists."""

    done: bool = True


class CpuTier:
    """See ``contract.tier.Tier``. ``threads`` splits disjoint outputs and never changes bits.

    ``definitions_only`` runs every opcode by its definition: far slower, and what the fast
    kernels are compared with.
    """

    def __init__(self, threads: int | None = None, *, definitions_only: bool = False) -> None:
        self.threads = threads or thread_count()
        self._matrices = PreparedMatrices()
        self._fast = {} if definitions_only else fast_kernels(self._matrices, self.threads)
        self._buffers: dict[int, CpuBuffer] = {}
        self._arena = np.empty(0, np.uint8)

    @property
    def info(self) -> TierInfo:
        """This machine."""
        return TierInfo(
            name="cpu",
            device=platform.processor() or platform.machine(),
            driver=f"numpy {np.__version__}",
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=frozenset(DEFINITIONS),
            memory_bytes=psutil.virtual_memory().total,
            host_unified=True,
        )

    @property
    def allocated_bytes(self) -> int:
        """Buffers, prepared weights and the arena of scratch buffers."""
        owned = sum(buffer.nbytes for buffer in self._buffers.values() if buffer.owned)
        return owned + self._matrices.nbytes + self._arena.nbytes

    @property
    def available_bytes(self) -> int:
        """Memory the machine can give without swapping."""
        return psutil.virtual_memory().available

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        _check_opcodes(graph)
        return cpu_footprint(graph, largest, frozenset(self._fast), self.threads)

    def reserve(self, graph: Graph, largest: ShapeKey, variants: int) -> None:
        """Make the arena as large as the largest step needs; lowered steps take nothing here."""
        _check_opcodes(graph)
        self._grow_arena(plan_scratch(graph, largest).nbytes)

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> CpuBuffer:
        """Zeroed host memory. Raises OutOfMemory naming the buffer."""
        _check_fits(decl.name, nbytes)
        return self._keep(CpuBuffer(decl.name, nbytes, heap, np.zeros(nbytes, np.uint8)))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> CpuBuffer:
        """A view of ``data``; nothing is copied."""
        matrix = None
        if decl.dtype.storage is not StorageClass.INDEX:
            shape = tuple(int(dim) for dim in decl.shape)
            matrix = Matrix(decl.dtype, shape, data)
        owned = owns_upload(decl)
        return self._keep(CpuBuffer(decl.name, data.nbytes, Heap.HOST_VISIBLE, data, matrix, owned))

    def free(self, buffer: CpuBuffer) -> None:
        """Forget the buffer; arrays still bound to a batch keep its memory."""
        del self._buffers[id(buffer)]
        if buffer.matrix is not None:
            self._matrices.forget(buffer.matrix)

    def map(self, buffer: CpuBuffer) -> NDArray[np.uint8]:
        """The bytes themselves."""
        return buffer.data

    def read(self, buffer: CpuBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        return buffer.data[offset : offset + nbytes].copy()

    def write(self, buffer: CpuBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        buffer.data[offset : offset + data.nbytes] = data

    def load_kernel(self, blob: bytes) -> CpuKernel:
        """A ``.zrt`` file for this target: its code is an opcode's lower-case name."""
        header = decode_kernel(blob)
        name = bytes(header.code).decode("utf-8", "replace")
        opcode = next((o for o in DEFINITIONS if TABLE[o].name == name), None)
        if header.target is not GpuTarget.CPU_NUMPY or opcode is None:
            raise CodecError(f"kernel {header.name}: target {header.target.name}, not a cpu opcode")
        return CpuKernel(header, opcode)

    def lower(self, graph: Graph, buffers: Mapping[str, CpuBuffer], key: ShapeKey) -> CpuBatch:
        """Bind every node's operands to arrays. Raises UnsupportedOp for a missing opcode and
        OutOfMemory when its scratch buffers do not fit."""
        _check_opcodes(graph)
        plan = plan_scratch(graph, key)
        self._grow_arena(plan.nbytes)
        arrays: dict[str, Bound] = {}
        for decl in graph.buffers.values():
            if decl.kind is BufferKind.SCRATCH:
                offset = plan.offsets.get(decl.name, 0)
                arrays[decl.name] = _array(decl, self._arena[offset:], key)
            else:
                buffer = buffers[decl.name]
                arrays[decl.name] = buffer.matrix or _array(decl, buffer.data, key)
        operands = tuple(
            {name: _operand(node, name, view, arrays) for name, view in node.operands.items()}
            for node in graph.nodes
        )
        calls = tuple(
            self._call(node, bound) for node, bound in zip(graph.nodes, operands, strict=True)
        )
        return CpuBatch(key, calls, graph.nodes, operands, self._arena)

    def submit(self, batch: CpuBatch, *, resume: bool = False) -> CpuFence:
        """Run the batch. Floating-point trouble shows in the values, never as a warning."""
        with np.errstate(all="ignore"):
            for call in batch.calls:
                call()
        return CpuFence()

    def wait(self, fence: CpuFence, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Drop all buffers."""
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _grow_arena(self, nbytes: int) -> None:
        if self._arena.nbytes < nbytes:
            _check_fits("scratch", nbytes)
            self._arena = np.empty(nbytes, np.uint8)

    def _keep(self, buffer: CpuBuffer) -> CpuBuffer:
        self._buffers[id(buffer)] = buffer
        return buffer

    def _call(self, node: Node, bound: Mapping[str, Bound]) -> Callable[[], None]:
        fast = self._fast.get(node.opcode)
        return fast(bound, node.params) if fast else define(node, bound)


def _check_opcodes(graph: Graph) -> None:
    missing = sorted(o.name for o in graph.opcodes if o not in DEFINITIONS)
    if missing:
        raise UnsupportedOp("cpu", missing)


def _check_fits(what: str, nbytes: int) -> None:
    memory = psutil.virtual_memory()
    if nbytes > memory.available:
        raise OutOfMemory(what, nbytes, memory.used, memory.available)


def define(node: Node, bound: Mapping[str, Bound]) -> Callable[[], None]:
    """A call of the opcode's definition that stores what it returns in the bound outputs."""
    spec = TABLE[node.opcode]
    written = [o.name for o in spec.outputs if o.access is Access.WRITE]
    outputs = [bound[name] for name in written]
    definition = DEFINITIONS[node.opcode]
    arguments = {name: array for name, array in bound.items() if name not in written}
    arguments.update(node.params)

    def call() -> None:
        results = definition(**arguments)
        if len(outputs) == 1:
            outputs[0][...] = results
        else:
            for output, result in zip(outputs, results or (), strict=True):
                output[...] = result

    return call


def _array(decl: BufferDecl, data: NDArray[np.uint8], key: ShapeKey) -> NDArray[Any]:
    shape = concrete_shape(decl, key)
    if decl.dtype is I12:
        return page_view(data, decl.dtype, shape)
    dtype = NUMPY_DTYPES.get(decl.dtype, np.dtype(np.uint8))
    if decl.dtype not in NUMPY_DTYPES:
        shape = (*shape[:-1], decl.dtype.row_bytes(shape[-1]))
    count = int(np.prod(shape, dtype=np.int64))
    return data.reshape(-1)[: count * dtype.itemsize].view(dtype).reshape(shape)


def _operand(node: Node, name: str, view: View, arrays: Mapping[str, Bound]) -> Bound:
    bound = arrays[view.buffer]
    if isinstance(bound, Matrix) and TABLE[node.opcode].operand(name).dtypes == (F32,):
        bound = bound.blocks.reshape(-1).view("<f4").reshape(bound.shape)
    if view.columns is not None:
        start, stop = view.columns
        bound = bound[..., start:stop]
    return bound
