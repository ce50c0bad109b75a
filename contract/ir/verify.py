"""The verifier of graphs: a tier may lower a verified graph without further checks.

Each rule has a stable name (``Rule``), which is reported with the node that breaks it. Rules of
memory:

- A plain WRITE gives every column of a SCRATCH or OUTPUT buffer its value at most once per step, so
  a read after a write is pure data flow and needs no barrier.
- An UPDATE reads and writes in place. Any later access of the same columns, also by another UPDATE,
  needs a BARRIER in between. Accumulations are no exception: a sum of floating-point numbers
  depends on the order of its additions, and that order is part of the result.
- An UPDATE of an OUTPUT buffer continues with what the previous step left there (the output ring).
- A tier executes an UPDATE after all earlier reads of the same buffer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from itertools import combinations

from contract.errors import VerifyError
from contract.ir.nodes import BufferDecl, BufferKind, Graph, Node, View
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import SYMBOLS
from contract.spec import (
    MAX_BINDINGS,
    Access,
    Operand,
    OpSpec,
    Param,
    Scalar,
    ShapeMismatch,
    bind_shapes,
)

MAX_PARAM = 2**31 - 1
"""Largest integer parameter; kernels read parameters as int32."""

Columns = tuple[int, int]

WRITABLE: Mapping[Access, tuple[BufferKind, ...]] = {
    Access.WRITE: (BufferKind.SCRATCH, BufferKind.OUTPUT),
    Access.UPDATE: (BufferKind.SCRATCH, BufferKind.OUTPUT, BufferKind.STATE),
}
SLICES_ROWS = (Opcode.MATMUL, Opcode.LM_HEAD)
"""The opcodes that can read the first rows of a matrix: tiers store matrices in groups of rows, so
their beginning is that of a smaller matrix."""
PERSISTENT = (BufferKind.WEIGHT, BufferKind.CONSTANT, BufferKind.STATE)
STEP_LOCAL = (BufferKind.SCRATCH, BufferKind.OUTPUT)


class Rule(StrEnum):
    """The rules of a valid graph. The values are stable: tests and users match on them."""

    NOT_EMPTY = "not empty"
    UNIQUE_NAME = "unique name"
    ONE_DECLARATION = "one declaration"
    BUFFER_SHAPE = "buffer shape"
    WHOLE_BLOCKS = "whole blocks"
    KNOWN_OPCODE = "known opcode"
    OPERANDS = "operands"
    PARAMS = "params"
    DECLARED_BUFFERS = "declared buffers"
    VIEW_COLUMNS = "view columns"
    VIEW_ROWS = "view rows"
    SHAPE_RULE = "shape rule"
    CONSTRAINT = "constraint"
    DTYPE = "dtype"
    STAGE = "stage"
    BINDINGS = "bindings"
    ALIASED_OPERANDS = "aliased operands"
    READ_BEFORE_WRITE = "read before write"
    WRITABLE_BUFFER = "writable buffer"
    DISJOINT_WRITES = "disjoint writes"
    UNGUARDED_READ = "unguarded read after in-place write"
    OUTPUT_WRITTEN = "output written"


Problems = Iterator[tuple[Rule, str]]
"""Broken rules, each with a sentence that describes the problem."""


def verify(graph: Graph) -> None:
    """Raise VerifyError for the first rule the graph breaks, in order of nodes."""
    memory = _Memory(graph)
    for name, problems in _checks(graph, memory):
        for rule, problem in problems:
            raise VerifyError(graph.name, name, rule, problem)


def _checks(graph: Graph, memory: _Memory) -> Iterator[tuple[str, Problems]]:
    """Yield the problems of each check with the name of the node or buffer it checks."""
    if not graph.nodes:
        yield "", iter([(Rule.NOT_EMPTY, "the graph has no nodes")])
    for name, decl in graph.buffers.items():
        yield name, declaration_problems(name, decl)
    seen: set[str] = set()
    checked: set[Hashable] = set()
    # The signatures of nodes that broke no rule: most layers of a model are alike.
    for node in graph.nodes:
        if not node.name or node.name in seen:
            yield node.name, iter([(Rule.UNIQUE_NAME, "the name is empty or used twice")])
        seen.add(node.name)
        signature = _signature(graph, node)
        if signature is None or signature not in checked:
            yield node.name, _node_problems(graph, node)
            checked.add(signature)
        yield node.name, memory.step(node)
    for decl in graph.of_kind(BufferKind.OUTPUT):
        yield decl.name, memory.output_problems(decl)


def declaration_problems(name: str, decl: BufferDecl) -> Problems:
    """Check one declaration by itself: name, dimensions, whole quantization blocks."""
    if decl.name != name or not name:
        yield Rule.ONE_DECLARATION, f"the declaration calls itself {decl.name!r}"
    if not decl.shape:
        yield Rule.BUFFER_SHAPE, "a buffer has at least one dimension"
    for axis, dim in enumerate(decl.shape):
        if isinstance(dim, str):
            problem = _symbol_problem(decl, axis, dim)
        else:
            problem = f"dimension {axis} is {dim}" if dim < 1 else ""
        if problem:
            yield Rule.BUFFER_SHAPE, problem
    last = decl.shape[-1]
    block = decl.dtype.block_elements
    if block > 1 and (isinstance(last, str) or last % block):
        yield (
            Rule.WHOLE_BLOCKS,
            f"rows of {last} elements are not a multiple of {block} ({decl.dtype})",
        )


def _symbol_problem(decl: BufferDecl, axis: int, symbol: str) -> str:
    if symbol not in SYMBOLS:
        return f"dimension {axis} is {symbol!r}, not a number or one of {', '.join(SYMBOLS)}"
    if axis:
        return f"the symbol {symbol} is dimension {axis}; only the first may vary"
    if decl.kind in PERSISTENT:
        return f"a {decl.kind.name} buffer outlives the step, its size cannot be {symbol}"
    return ""


def signature_problems(node: Node) -> Problems:
    """Check a node's operand and parameter names, and its parameter values."""
    spec = TABLE.get(node.opcode)
    if spec is None:
        yield Rule.KNOWN_OPCODE, f"{node.opcode!r} is not in the opcode table"
        return
    if surplus := sorted(set(node.operands) - {o.name for o in spec.operands}):
        yield Rule.OPERANDS, f"{spec.name} has no operand {', '.join(surplus)}"
    if surplus := sorted(set(node.params) - {p.name for p in spec.params}):
        yield Rule.PARAMS, f"{spec.name} has no parameter {', '.join(surplus)}"
    for param in spec.params:
        problem = _param_problem(param, node.params.get(param.name))
        if problem:
            yield Rule.PARAMS, f"{param.name} {problem}"


def _param_problem(param: Param, value: Scalar | None) -> str:
    if value is None:
        return "is missing"
    if type(value) is not param.kind:
        return f"is {value!r}, not {param.kind.__name__}"
    if param.kind is int and abs(value) > MAX_PARAM:
        return f"is {value}, beyond int32"
    if not math.isfinite(value):
        return f"is {value}, not a finite number"
    if param.minimum is not None and value < param.minimum:
        return f"is {value}, below {param.minimum:g}"
    if param.choices and not 0 <= value < len(param.choices):
        return f"is {value}, not 0..{len(param.choices) - 1} ({', '.join(param.choices)})"
    return ""


def _signature(graph: Graph, node: Node) -> Hashable:
    """All that ``_node_problems`` depends on; None if a buffer is not declared."""
    operands = []
    for name, view in node.operands.items():
        decl = graph.buffers.get(view.buffer)
        if decl is None:
            return None
        shown = decl.shape, view.columns, view.rows
        operands.append((name, decl.kind, id(decl.dtype), shown))
    # True equals 1, which equals 1.0.
    params = [(name, type(value), value) for name, value in node.params.items()]
    buffers = len({view.buffer for view in node.operands.values()})
    return node.opcode, tuple(operands), tuple(params), buffers


def _node_problems(graph: Graph, node: Node) -> Problems:
    yield from signature_problems(node)
    spec = TABLE[node.opcode]
    missing = [o.name for o in spec.operands if not o.optional and o.name not in node.operands]
    if missing:
        yield Rule.OPERANDS, f"{', '.join(missing)} missing of {spec.name}"
    if graph.stage & spec.stages != graph.stage:
        served = f"{spec.name} serves {spec.stages.name}, the graph {graph.stage.name}"
        yield Rule.STAGE, served
    for operand in spec.operands:
        if operand.name in node.operands:
            view = node.operands[operand.name]
            yield from _operand_problems(graph, operand, view)
            if view.rows is not None and node.opcode not in SLICES_ROWS:
                yield Rule.VIEW_ROWS, f"{spec.name} reads whole matrices, {operand.name} is a part"
    count = len({view.buffer for view in node.operands.values()})
    if count > MAX_BINDINGS:
        yield Rule.BINDINGS, f"touches {count} buffers, at most {MAX_BINDINGS} can be bound"
    yield from _shape_problems(graph, node, spec)


def _operand_problems(graph: Graph, operand: Operand, view: View) -> Problems:
    decl = graph.buffers.get(view.buffer)
    if decl is None:
        yield Rule.DECLARED_BUFFERS, f"{operand.name} is {view.buffer!r}, which is not declared"
        return
    if decl.dtype not in operand.dtypes:
        expected = " or ".join(map(str, operand.dtypes))
        yield Rule.DTYPE, f"{operand.name} ({view.buffer}) is {decl.dtype}, expected {expected}"
    kinds = WRITABLE.get(operand.access)
    if kinds is not None and decl.kind not in kinds:
        written = f"{operand.name} ({operand.access.value})"
        yield Rule.WRITABLE_BUFFER, f"{written} is {view.buffer}, a {decl.kind.name} buffer"
    if problem := _view_problem(decl, view):
        yield Rule.VIEW_COLUMNS, f"{operand.name}: {problem}"
    if view.rows is not None and not _has_rows(decl, view):
        yield Rule.VIEW_ROWS, f"{operand.name}: {view.rows} rows of {decl.name} {decl.shape}"


def _has_rows(decl: BufferDecl, view: View) -> bool:
    """Whether the view is the first rows of a weight matrix."""
    rows, matrix = decl.shape[0], decl.kind is BufferKind.WEIGHT and len(decl.shape) == 2
    fits = isinstance(rows, int) and view.rows is not None and 0 < view.rows <= rows
    return matrix and fits and view.columns is None


def _view_problem(decl: BufferDecl, view: View) -> str:
    if view.columns is None:
        return ""
    start, stop = view.columns
    last = decl.shape[-1]
    if isinstance(last, str) or not 0 <= start < stop <= last:
        return f"columns {start}:{stop} of {decl.name} are not within its {last} columns"
    block = decl.dtype.block_elements
    if start % block or stop % block:
        return f"columns {start}:{stop} of {decl.name} cut a block of {block} ({decl.dtype})"
    return ""


def _shape_problems(graph: Graph, node: Node, spec: OpSpec) -> Problems:
    shapes = {name: graph.shape(view) for name, view in node.operands.items()}
    try:
        bound = bind_shapes(spec, shapes, node.params)
    except ShapeMismatch as error:
        yield Rule.SHAPE_RULE, str(error)
        return
    if problem := spec.constraint(bound, node.params):
        yield Rule.CONSTRAINT, problem


@dataclass(slots=True)
class _Memory:
    """The accesses to every buffer so far, while walking the nodes in order."""

    graph: Graph
    written: dict[str, list[tuple[Columns, str]]] = field(default_factory=lambda: defaultdict(list))
    unsettled: dict[str, list[tuple[Columns, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """In-place writes since the last barrier."""

    def step(self, node: Node) -> Problems:
        """Yield the memory problems of one node and record its accesses."""
        if node.opcode is Opcode.BARRIER:
            self.unsettled.clear()
            return
        accesses = [
            (operand, node.operands[operand.name], self._columns(node.operands[operand.name]))
            for operand in TABLE[node.opcode].operands
            if operand.name in node.operands
        ]
        yield from _alias_problems(accesses)
        for operand, view, columns in accesses:
            yield from self._read_problems(operand, view, columns)
        for operand, view, columns in accesses:
            if operand.access is Access.WRITE:
                yield from self._write_problems(operand, view, columns)
            elif operand.access is Access.UPDATE:
                self.unsettled[view.buffer].append((columns, node.name))
            if operand.access is not Access.READ:
                self.written[view.buffer].append((columns, node.name))

    def output_problems(self, decl: BufferDecl) -> Problems:
        """Yield a problem unless nodes wrote the whole of an output."""
        if not _covers(self.written[decl.name], self._columns(View(decl.name))):
            yield Rule.OUTPUT_WRITTEN, "no node writes the whole of this output"

    def _columns(self, view: View) -> Columns:
        if view.columns is not None:
            return view.columns
        last = self.graph.buffers[view.buffer].shape[-1]
        return (0, 1 if isinstance(last, str) else last)

    def _read_problems(self, operand: Operand, view: View, columns: Columns) -> Problems:
        for updated, writer in self.unsettled.get(view.buffer, ()):
            if _overlap(updated, columns):
                yield (
                    Rule.UNGUARDED_READ,
                    f"{operand.name} ({view.buffer}) was updated in place by {writer}; "
                    "put a barrier in between",
                )
        kind = self.graph.buffers[view.buffer].kind
        continues = kind is BufferKind.OUTPUT and operand.access is Access.UPDATE
        if operand.access is Access.WRITE or kind not in STEP_LOCAL or continues:
            return
        if not _covers(self.written[view.buffer], columns):
            yield (
                Rule.READ_BEFORE_WRITE,
                f"{operand.name} reads columns {columns[0]}:{columns[1]} of {view.buffer}, "
                "not all of which an earlier node wrote",
            )

    def _write_problems(self, operand: Operand, view: View, columns: Columns) -> Problems:
        for written, writer in self.written[view.buffer]:
            if _overlap(written, columns):
                yield (
                    Rule.DISJOINT_WRITES,
                    f"{operand.name} writes columns {columns[0]}:{columns[1]} of {view.buffer}, "
                    f"of which {writer} already wrote {written[0]}:{written[1]}",
                )


def _alias_problems(accesses: Sequence[tuple[Operand, View, Columns]]) -> Problems:
    if len({view.buffer for _, view, _ in accesses}) == len(accesses):
        return
    for (other, first, columns), (operand, view, own) in combinations(accesses, 2):
        both_read = operand.access is Access.READ and other.access is Access.READ
        if view.buffer == first.buffer and not both_read and _overlap(own, columns):
            yield (
                Rule.ALIASED_OPERANDS,
                f"{other.name} and {operand.name} are the same memory ({view.buffer}) "
                "and one of them is written",
            )


def _overlap(a: Columns, b: Columns) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _covers(written: Iterable[tuple[Columns, str]], requested: Columns) -> bool:
    position = requested[0]
    for (start, stop), _ in sorted(written):
        if start > position:
            break
        position = max(position, stop)
    return position >= requested[1]
