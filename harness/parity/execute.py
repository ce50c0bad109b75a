"""Runs one case: on a tier through a one-node graph, and by the opcode's definition."""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.arrays import Array, Bytes
from contract.dtypes import F32, I32, DType
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder, View
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes, concrete_shape
from contract.ops import TABLE
from contract.shape_key import SYMBOLS, ShapeKey
from contract.spec import Access, Operand, shape_of
from contract.tier import Buffer, Tier
from harness.parity.cases import Case
from harness.parity.operands import fill, operand_dtype
from harness.validate.compare import bit_pattern
from reference.exact.kv_storage import page_view
from reference.matrix import Matrix
from reference.ops import DEFINITIONS


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element that differs.

    Numbers are written as Python writes them, bit patterns in hexadecimal. When shapes or types
    differ there is no element to name, and only ``note`` is set."""

    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    expected_bits: str = ""
    got_bits: str = ""
    differing: int = 0
    elements: int = 0
    note: str = ""

    def __str__(self) -> str:
        return self.note or (
            f"{self.differing} of {self.elements} differ, first {self.index}: "
            f"{self.got} (0x{self.got_bits}) not {self.expected} (0x{self.expected_bits})"
        )


def difference(expected: Array, got: Array, *, may_break: bool) -> Difference | None:
    """The first difference, None when all elements are equal (-0 equals +0).

    NaN equals NaN only if ``may_break`` says that a NaN can be a correct result."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        found = f"{got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}"
        return Difference(note=found)
    same = got == expected
    if may_break and got.dtype.kind == "f":
        same |= np.isnan(got) & np.isnan(expected)
    if same.all():
        return None
    index = tuple(int(i) for i in np.argwhere(~same)[0])
    return Difference(
        index=index,
        expected=str(expected[index]),
        got=str(got[index]),
        expected_bits=bit_pattern(expected[index]),
        got_bits=bit_pattern(got[index]),
        differing=int((~same).sum()),
        elements=same.size,
    )


ELEMENT: Mapping[DType, np.dtype[Any]] = {F32: np.dtype("<f4"), I32: np.dtype("<i4")}
MARGIN = 3
"""Columns of garbage on both sides of an activation that is passed as a slice."""
ROUND = 256
"""Least bytes of a buffer, since an operand may have none."""

Results = dict[str, Array]


def by_definition(case: Case, operands: Mapping[str, Any]) -> Results:
    """Every written and updated operand, as the definition computes it."""
    spec = TABLE[case.opcode]
    arguments = deepcopy(dict(operands))
    with np.errstate(all="ignore"):
        returned = DEFINITIONS[case.opcode](**arguments, **case.params)
    written = [o.name for o in spec.outputs if o.access is Access.WRITE]
    results = {o.name: arguments[o.name] for o in spec.outputs if o.access is Access.UPDATE}
    values = (returned,) if len(written) == 1 else returned or ()
    results |= dict(zip(written, values, strict=True))
    return {name: _comparable(array) for name, array in results.items()}


def _comparable(array: Array) -> Array:
    """``array``, with records as plain bytes."""
    if array.dtype.names is None:
        return array
    return array.view(np.uint8).reshape(*array.shape, array.itemsize)


def is_sliced(case: Case, operand: Operand) -> bool:
    """Whether the operand is a column range of a wider buffer, as in half of the cases."""
    return (
        bool(case.seed & 1)
        and operand.access is Access.READ
        and operand.dtypes == (F32,)
        and operand.dims[0] in SYMBOLS
    )


def build_graph(case: Case) -> Graph:
    """A graph of the opcode alone; each operand is a buffer of the operand's name."""
    spec = TABLE[case.opcode]
    builder = GraphBuilder(str(case), spec.stages)
    views: dict[str, View] = {}
    for operand in spec.operands:
        if operand.name in case.shape.absent:
            continue
        shape = list(shape_of(operand, {**case.sizes, **{name: name for name in SYMBOLS}}))
        columns = shape[-1]
        sliced = is_sliced(case, operand)
        if sliced:
            shape[-1] = int(columns) + 2 * MARGIN
        dtype = operand_dtype(case, operand)
        view = builder.buffer(operand.name, _kind(operand), dtype, shape)
        views[operand.name] = view[MARGIN : MARGIN + int(columns)] if sliced else view
    builder.emit(case.opcode, "", **views, **case.params)
    return builder.build()


def _kind(operand: Operand) -> BufferKind:
    if operand.access is Access.WRITE:
        return BufferKind.OUTPUT
    if operand.access is Access.UPDATE or operand.name in ("kv", "slot_table"):
        return BufferKind.STATE
    if operand.dims[0] in SYMBOLS or operand.dtypes == (I32,):
        return BufferKind.REQUEST
    return BufferKind.CONSTANT if operand.name == "rope_table" else BufferKind.WEIGHT


def on_tier(tier: Tier, case: Case, operands: Mapping[str, Any]) -> Results:
    """Every written and updated operand, as the tier computes it."""
    graph = build_graph(case)
    sizes = case.sizes
    step = ShapeKey(sizes.get("tokens", 0), sizes.get("rows", 0))
    layout = input_layout(graph, step)
    inputs: dict[str, Array] = {}
    buffers: dict[str, Buffer] = {}
    try:
        for operand in TABLE[case.opcode].operands:
            if operand.name in graph.buffers:
                decl = graph.buffers[operand.name]
                content: Any = operands.get(operand.name)
                if is_sliced(case, operand):
                    margins = [(0, 0)] * (content.ndim - 1) + [(MARGIN, MARGIN)]
                    content = np.pad(content, margins, constant_values=np.float32(np.nan))
                if decl.kind is BufferKind.REQUEST:
                    inputs[decl.name] = content
                else:
                    buffers[decl.name] = _provide(tier, decl, content, step)
        batch = tier.lower(graph, buffers, step, layout)
        tier.wait(tier.submit(batch, pack_inputs(layout, step, inputs)))
        return {
            decl.name: _read(tier, buffers[decl.name], decl, concrete_shape(decl, step))
            for decl in (graph.buffers[o.name] for o in TABLE[case.opcode].outputs)
        }
    finally:
        for buffer in buffers.values():
            tier.free(buffer)


def _provide(tier: Tier, decl: BufferDecl, content: Any, key: ShapeKey) -> Any:
    if decl.kind in (BufferKind.WEIGHT, BufferKind.CONSTANT):
        return tier.upload(decl, _rows(content))
    buffer = tier.alloc(decl, max(ROUND, buffer_bytes(decl, key)))
    if content is None:
        tier.write(buffer, 0, np.full(buffer.nbytes, 0xFF, np.uint8))
    else:
        tier.write(buffer, 0, np.ascontiguousarray(content).reshape(-1).view(np.uint8))
    return buffer


def _rows(content: Matrix | Array) -> Bytes:
    if isinstance(content, Matrix):
        return content.blocks
    return content.reshape(-1, content.shape[-1]).view(np.uint8)


def _read(tier: Tier, buffer: Buffer, decl: BufferDecl, shape: tuple[int, ...]) -> Array:
    data = tier.read(buffer, 0, math.prod(shape[:-1]) * decl.dtype.row_bytes(shape[-1]))
    if decl.name == "kv":
        return _comparable(page_view(data, decl.dtype, shape))
    return data.view(ELEMENT[decl.dtype]).reshape(shape)


def run_barrier(tier: Tier) -> None:
    """Execute BARRIER, the only opcode without operands."""
    builder = GraphBuilder("barrier")
    builder.barrier()
    graph, step = builder.build(), ShapeKey(1, 1)
    layout = input_layout(graph, step)
    batch = tier.lower(graph, {}, step, layout)
    tier.wait(tier.submit(batch, pack_inputs(layout, step, {})))


@dataclass(frozen=True, slots=True)
class Example:
    """A case with its operands and the results of the definition."""

    case: Case
    operands: Mapping[str, Any]
    expected: Results


def example(case: Case) -> Example:
    """The operands of a case and the results every tier must give."""
    operands = fill(case)
    return Example(case, operands, by_definition(case, operands))


def compare(tier: Tier, case: Case | Example) -> dict[str, Difference]:
    """The operands for which the tier's results differ from the definition's, by name."""
    known = example(case) if isinstance(case, Case) else case
    case, expected = known.case, known.expected
    got = on_tier(tier, case, known.operands)
    assert got.keys() == expected.keys()
    found = {}
    for operand in TABLE[case.opcode].outputs:
        may_break = case.may_break or operand.access is Access.UPDATE
        name = operand.name
        problem = difference(expected[name], got[name], may_break=may_break)
        if problem is not None:
            found[name] = problem
    return found
