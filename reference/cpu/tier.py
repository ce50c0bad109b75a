"""The CPU tier: runs a lowered graph node by node, each a numpy function on bound arrays.

It is the oracle of all other tiers. Every opcode runs its definition from ``reference.ops``, except
where ``reference.cpu.kernels`` has a faster function with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from contract.arithmetic import ARITHMETIC_VERSION
from contract.cancel_token import CancelToken
from contract.context_manager import ContextManager
from contract.dtypes import BF16, F16, F32, I32, DType, StorageClass
from contract.errors import OutOfMemory, StepAbandoned, UnsupportedOp
from contract.footprint import Footprint, owns_upload
from contract.ir.decode_form import decode_form
from contract.ir.graph import BufferDecl, BufferKind, Graph, Node, View
from contract.ir.inputs import InputCopy, InputLayout, InputRows, step_of
from contract.ir.prune_rows import prune_rows
from contract.ir.scratch import ScratchPlan, buffer_bytes, concrete_shape, plan_scratch
from contract.memory_limits import within_limits
from contract.ops import TABLE
from contract.processors import processor_name
from contract.shape_key import ShapeKey
from contract.spec import Access
from contract.tier import AbandonsSteps, DeviceTier, TierInfo, check_bucket, check_range
from reference.cpu.experts import Call
from reference.cpu.footprint import cpu_footprint
from reference.cpu.kernels import fast_kernels
from reference.cpu.prepared import PreparedMatrices
from reference.cpu.threads import limit_blas, thread_count
from reference.exact.kv_storage import page_view
from reference.matrix import Matrix
from reference.ops import DEFINITIONS

NUMPY_DTYPES: Mapping[DType, np.dtype[Any]] = {
    F32: np.dtype("<f4"),
    F16: np.dtype("<f2"),
    BF16: np.dtype("<u2"),
    I32: np.dtype("<i4"),
}
"""Types whose elements numpy can address; all others are rows of bytes."""

Bound = NDArray[Any] | Matrix

MAX_BOUND_STEPS = 64
"""Most step sizes whose calls a batch caches; they are views of the same arrays, quick to make."""


@dataclass(slots=True, eq=False)
class CpuBuffer:
    """Host memory of one graph buffer: bytes, [rows, row_bytes] for an uploaded matrix.

    If ``owned`` is False the bytes are a view of the model file."""

    name: str
    nbytes: int
    data: NDArray[np.uint8]
    matrix: Matrix | None = None
    owned: bool = True


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """A lowered graph and its memory. ``inputs`` is the block of inputs of the step that runs.

    ``calls`` returns, for the token and row counts of a step, the calls to run in order; they read
    and write views of the batch's memory."""

    graph: Graph
    bucket: ShapeKey
    inputs: InputCopy
    buffers: Mapping[str, CpuBuffer]
    calls: Callable[[ShapeKey], Sequence[Call]]

    @property
    def packets(self) -> int:
        """The numpy calls one submission runs."""
        return len(self.graph.nodes)


@dataclass(frozen=True, slots=True)
class CpuFence:
    """A fence that is done at once, since ``submit`` runs the step to completion."""

    outputs: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    done: bool = True


class CpuTier(ContextManager):
    """The CPU tier, see ``contract.tier``. ``threads`` threads split outputs and change no bits.

    ``definitions_only`` runs every opcode by its definition. That is far slower; the fast kernels
    are compared with it."""

    def __init__(self, threads: int | None = None, *, definitions_only: bool = False) -> None:
        limit_blas()
        self.threads = threads or thread_count()
        self._matrices = PreparedMatrices()
        self._fast = {} if definitions_only else fast_kernels(self._matrices, self.threads)
        self._buffers: dict[int, CpuBuffer] = {}
        self._arena = np.empty(0, np.uint8)
        self._inputs = InputCopy(np.empty(0, np.uint8))
        self._token: CancelToken | None = None

    @property
    def info(self) -> TierInfo:
        """The identity of this machine."""
        return TierInfo(
            name="cpu",
            device=processor_name(),
            driver=f"numpy {np.__version__}",
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=frozenset(DEFINITIONS),
            memory_bytes=psutil.virtual_memory().total,
            host_unified=True,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of buffers, prepared weights, the scratch arena and the inputs of a step."""
        owned = sum(buffer.nbytes for buffer in self._buffers.values() if buffer.owned)
        return owned + self._matrices.nbytes + self._arena.nbytes + self._inputs.data.nbytes

    @property
    def available_bytes(self) -> int:
        """Bytes the machine can give without swapping, within the limits of this process."""
        return within_limits(psutil.virtual_memory().available)

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """One bucket: numpy runs every number of tokens and rows the same way."""
        return (largest,)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        _check_opcodes(graph)
        graph = self._as_run(graph, largest)
        return cpu_footprint(graph, largest, frozenset(self._fast), self.threads)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Allocate the scratch arena for the largest step."""
        _check_opcodes(graph)
        self._grow_arena(plan_scratch(self._as_run(graph, largest), largest).nbytes)

    def alloc(self, decl: BufferDecl, nbytes: int) -> CpuBuffer:
        """Allocate zeroed host memory. Raises OutOfMemory naming the buffer."""
        _check_fits(decl.name, nbytes)
        return self._keep(CpuBuffer(decl.name, nbytes, np.zeros(nbytes, np.uint8)))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> CpuBuffer:
        """A view of ``data``; nothing is copied."""
        matrix = None
        if decl.dtype.storage is not StorageClass.INDEX:
            shape = tuple(int(dim) for dim in decl.shape)
            matrix = Matrix(decl.dtype, shape, data)
        owned = owns_upload(decl)
        return self._keep(CpuBuffer(decl.name, data.nbytes, data, matrix, owned))

    def free(self, buffer: CpuBuffer) -> None:
        """Drop the buffer; arrays still bound to a batch keep its memory alive."""
        del self._buffers[id(buffer)]
        if buffer.matrix is not None:
            self._matrices.forget(buffer.matrix)

    def map(self, buffer: CpuBuffer) -> NDArray[np.uint8]:
        """The buffer's own bytes."""
        return buffer.data

    def read(self, buffer: CpuBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        check_range(buffer, offset, nbytes)
        return buffer.data[offset : offset + nbytes].copy()

    def write(self, buffer: CpuBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        check_range(buffer, offset, data.nbytes)
        buffer.data[offset : offset + data.nbytes] = data

    def lower(
        self, graph: Graph, buffers: Mapping[str, CpuBuffer], bucket: ShapeKey, inputs: InputLayout
    ) -> CpuBatch:
        """Bind the graph's memory for steps of ``bucket``. Raises UnsupportedOp for a missing
        opcode and OutOfMemory when its scratch buffers do not fit."""
        _check_opcodes(graph)
        graph = self._as_run(graph, bucket)
        plan = plan_scratch(graph, bucket)
        self._grow_arena(plan.nbytes)
        if self._inputs.data.nbytes < inputs.nbytes:
            self._inputs = InputCopy(np.empty(inputs.nbytes, np.uint8))
        memory = _StepMemory(graph, dict(buffers), plan, self._arena, self._inputs.data, inputs)

        @lru_cache(maxsize=MAX_BOUND_STEPS)
        def calls(step: ShapeKey) -> tuple[Call, ...]:
            arrays = memory.arrays(step)
            return tuple(self.call_of(node, bind(node, arrays)) for node in graph.nodes)

        return CpuBatch(graph, bucket, self._inputs, MappingProxyType(memory.buffers), calls)

    def submit(
        self,
        batch: CpuBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> CpuFence:
        """Run the step. Floating-point overflow shows in the values, never as a warning."""
        step, token = step_of(inputs), self._token
        check_bucket(batch.bucket, step)
        batch.inputs.update(inputs, rows)
        with np.errstate(all="ignore"):
            for call in batch.calls(step):
                if token is not None and token.cancelled:
                    raise StepAbandoned("the step was abandoned")
                call()
        return CpuFence({name: self._output(batch, name, step) for name in requested})

    def submit_abandonable(
        self,
        batch: CpuBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None,
        token: CancelToken,
    ) -> CpuFence:
        """See ``contract.tier.AbandonsSteps``. Another thread cancels the token, or a signal
        handler."""
        self._token = token
        try:
            return self.submit(batch, inputs, requested, rows)
        finally:
            self._token = None

    def abandon(self) -> None:
        """Do nothing, since no step is in flight."""

    def wait(self, fence: CpuFence, timeout: float | None = None) -> None:
        """Return at once, since every fence is done."""

    def close(self) -> None:
        """Drop all buffers, and the memory of steps."""
        self._buffers.clear()
        self._arena = np.empty(0, np.uint8)
        self._inputs = InputCopy(np.empty(0, np.uint8))

    def _as_run(self, graph: Graph, bucket: ShapeKey) -> Graph:
        """The graph to run: as written for definitions, which are the oracle, else with rows
        pruned."""
        return decode_form(prune_rows(graph, bucket), bucket) if self._fast else graph

    def _grow_arena(self, nbytes: int) -> None:
        if self._arena.nbytes < nbytes:
            _check_fits("scratch", nbytes)
            self._arena = np.empty(nbytes, np.uint8)

    def _keep(self, buffer: CpuBuffer) -> CpuBuffer:
        self._buffers[id(buffer)] = buffer
        return buffer

    def _output(self, batch: CpuBatch, name: str, step: ShapeKey) -> NDArray[np.uint8]:
        nbytes = buffer_bytes(batch.graph.buffers[name], step)
        return batch.buffers[name].data.reshape(-1)[:nbytes].copy()

    def call_of(self, node: Node, bound: Mapping[str, Bound]) -> Call:
        """The call that computes ``node``: a fast kernel, else the definition."""
        fast = self._fast.get(node.opcode)
        return fast(bound, node.params) if fast else define(node, bound)


@dataclass(frozen=True, slots=True)
class _StepMemory:
    """The memory of a lowered graph's buffers."""

    graph: Graph
    buffers: Mapping[str, CpuBuffer]
    scratch: ScratchPlan
    arena: NDArray[np.uint8]
    block: NDArray[np.uint8]
    inputs: InputLayout

    def arrays(self, step: ShapeKey) -> dict[str, Bound]:
        """Views of every buffer with the sizes of ``step``."""
        arrays: dict[str, Bound] = {}
        for decl in self.graph.buffers.values():
            if decl.kind is BufferKind.SCRATCH:
                start = self.scratch.offsets.get(decl.name, 0)
                arrays[decl.name] = _array(decl, self.arena[start:], step)
            elif decl.kind is BufferKind.REQUEST:
                start = self.inputs.offsets[decl.name]
                arrays[decl.name] = _array(decl, self.block[start:], step)
            else:
                buffer = self.buffers[decl.name]
                arrays[decl.name] = buffer.matrix or _array(decl, buffer.data, step)
        return arrays


def _check_opcodes(graph: Graph) -> None:
    missing = sorted(o.name for o in graph.opcodes if o not in DEFINITIONS)
    if missing:
        raise UnsupportedOp("cpu", missing)


def _check_fits(purpose: str, nbytes: int) -> None:
    memory = psutil.virtual_memory()
    available = within_limits(memory.available)
    if nbytes > available:
        raise OutOfMemory(purpose, nbytes, memory.used, available)


def bind(node: Node, arrays: Mapping[str, Bound]) -> dict[str, Bound]:
    """The node's operands by name, from the graph's buffers."""
    return {name: _operand(node, name, view, arrays) for name, view in node.operands.items()}


def define(node: Node, bound: Mapping[str, Bound]) -> Call:
    """A call of the opcode's definition that stores what it returns in the bound outputs."""
    spec = TABLE[node.opcode]
    written = [o.name for o in spec.outputs if o.access is Access.WRITE]
    outputs = [cast("NDArray[Any]", bound[name]) for name in written]  # never a stored matrix
    arguments = {name: array for name, array in bound.items() if name not in written}
    definition = partial(DEFINITIONS[node.opcode], **arguments, **node.params)

    def call() -> None:
        results = definition()
        if len(outputs) == 1:
            outputs[0][...] = results
        else:
            for output, result in zip(outputs, results or (), strict=True):
                output[...] = result

    return call


def _array(decl: BufferDecl, data: NDArray[np.uint8], key: ShapeKey) -> NDArray[Any]:
    shape = concrete_shape(decl, key)
    if decl.dtype.storage is StorageClass.PAGES:
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
    if isinstance(bound, Matrix) and view.rows is not None:
        return bound.first_rows(view.rows)
    if view.columns is None:
        return bound
    if isinstance(bound, Matrix):
        raise TypeError(f"node {node.name}: {name} is a matrix as stored, which has no columns")
    start, stop = view.columns
    return bound[..., start:stop]


if TYPE_CHECKING:
    _conforms: type[DeviceTier[CpuBuffer, CpuBatch, CpuFence]] = CpuTier
    _abandons: type[AbandonsSteps] = CpuTier
