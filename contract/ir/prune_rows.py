"""Moves SELECT_ROWS earlier in a graph, so that fewer rows are computed.

A model family writes SELECT_ROWS before the last norm. The last layer needs keys and values of all
tokens, but everything after its attention is read only for the output rows. ``prune_rows`` selects
the rows there, so a prompt's last layer multiplies output rows instead of all tokens. Only opcodes
that compute each row by itself follow, so every row keeps its bits.

This is done only for shape buckets of many tokens and few rows. In other buckets a step may output
a row for each token, so nothing would be saved, and each extra node may cost a launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from contract.dtypes import F32
from contract.ir.nodes import BufferDecl, BufferKind, Graph, Node, View
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access

TOKENS, ROWS = "tokens", "rows"
Insertions = dict[View, int]
"""For each view, the index of the node before which an operation on it is inserted."""
MIN_TOKENS = 17
"""Fewest tokens of a bucket to prune: a smaller step's time is mostly that of reading weights,
which does not depend on the number of rows."""
TOKENS_A_ROW = 4
"""Fewest tokens per row of a bucket to prune. A tier whose buckets grow by at most this factor has
a smaller bucket for steps that output a row for each token."""

ROW_BY_ROW = frozenset(
    {
        Opcode.RMS_NORM,
        Opcode.RESIDUAL_RMS_NORM,
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP,
        Opcode.MATMUL,
        Opcode.HEAD_PRODUCT,
        Opcode.ADD,
        Opcode.SCALE,
        Opcode.XIELU,
        Opcode.SCALE_COLUMNS,
        Opcode.BIAS_ADD,
        Opcode.SWIGLU,
        Opcode.MOE_GATE_TOPK,
        Opcode.MOE_GATE_UP,
        Opcode.MOE_SWIGLU,
        Opcode.MOE_DOWN_ACC,
        Opcode.SHARED_EXPERT,
    }
)
"""Opcodes that compute each row of their results from weights and the same row of their inputs.
SSM_GATED_NORM is one, too, but kernels compute it together with the recurrence before it."""


def prune_rows(graph: Graph, bucket: ShapeKey) -> Graph:
    """The verified ``graph`` to be lowered for ``bucket``, with output rows selected early where
    that saves work. The result verifies, and nodes keep their names."""
    few = bucket.tokens >= MIN_TOKENS and bucket.tokens >= TOKENS_A_ROW * bucket.rows
    return select_rows_early(graph) if few else graph


def select_rows_early(graph: Graph) -> Graph:
    """``graph`` with its output rows selected as early as possible, or ``graph`` itself when that
    is no earlier. OUTPUT buffers still hold all tokens."""
    found = [
        n
        for n, node in enumerate(graph.nodes)
        if node.opcode is Opcode.SELECT_ROWS and graph.shape(node.operands["y"])[0] == ROWS
    ]
    if len(found) != 1:
        return graph
    (index,), uses = found, _Uses(graph)
    of_rows = uses.only_for_rows(index)
    selected, normed = uses.read_of_tokens(of_rows)
    views = [graph.nodes[index].operands[name] for name in ("x", "y")]
    whole = all(view.columns is None for view in views)
    local = all(graph.buffers[view.buffer].kind is BufferKind.SCRATCH for view in views)
    if not (of_rows and whole and local and all(uses.can_be_selected(view) for view in selected)):
        return graph
    return _moved(uses, index, of_rows, selected, normed)


class _Uses:
    """The nodes that write and read each buffer of ``graph``, by index in execution order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.writers: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[str, list[int]] = defaultdict(list)
        self.updated: set[str] = set()
        for number, node in enumerate(graph.nodes):
            for operand in TABLE[node.opcode].operands:
                if (view := node.operands.get(operand.name)) is not None:
                    if operand.access is not Access.READ:
                        self.writers[view.buffer].append(number)
                    if operand.access is not Access.WRITE:
                        self.readers[view.buffer].append(number)
                    if operand.access is Access.UPDATE:
                        self.updated.add(view.buffer)

    def only_for_rows(self, index: int) -> set[int]:
        """The row-by-row nodes whose results only the SELECT_ROWS at index ``index`` and other such
        nodes read."""
        found = {index}
        for number in reversed(range(index)):
            node = self.graph.nodes[number]
            if node.opcode in ROW_BY_ROW and self._is_read_by(node, number, found):
                found.add(number)
        return found - {index}

    def read_of_tokens(self, of_rows: set[int]) -> tuple[Insertions, Insertions]:
        """The views of all tokens that the nodes ``of_rows`` read: first the views to select rows
        of, then results of norms to recompute from selected rows. The original norm then stays
        fusable with the nodes that read all its rows."""
        selected: Insertions = {}
        normed: Insertions = {}
        for number in sorted(of_rows):
            for view in self.graph.nodes[number].operands.values():
                if self._is_of_tokens(view, of_rows):
                    source = view
                    if (norm := self.norm_of(view)) is not None:
                        normed.setdefault(view, number)
                        source = norm.operands["x"]
                    written = [n for n in self.writers[source.buffer] if n < number]
                    behind = max(written, default=-1)
                    selected.setdefault(source, min(n for n in of_rows if n > behind))
        return selected, normed

    def can_be_selected(self, view: View) -> bool:
        """Whether SELECT_ROWS can read ``view`` and finds the same data at any point of the
        graph."""
        decl = self.graph.buffers[view.buffer]
        return decl.dtype is F32 and len(decl.shape) == 2 and decl.name not in self.updated

    def norm_of(self, view: View) -> Node | None:
        """The RMS_NORM node whose whole result is ``view``, or None."""
        written = [self.graph.nodes[number] for number in self.writers[view.buffer]]
        if len(written) != 1 or written[0].opcode is not Opcode.RMS_NORM:
            return None
        return written[0] if written[0].operands["y"] == view else None

    def _is_of_tokens(self, view: View, of_rows: set[int]) -> bool:
        of_tokens = self.graph.shape(view)[0] == TOKENS
        return of_tokens and of_rows.isdisjoint(self.writers[view.buffer])

    def _is_read_by(self, node: Node, number: int, readers: Collection[int]) -> bool:
        """Whether only ``readers`` read the results of ``node`` and no other node writes them."""
        results = [self.graph.buffers[view.buffer] for view in _results(node)]
        read = [reader for decl in results for reader in self.readers[decl.name]]
        local = all(decl.kind is BufferKind.SCRATCH for decl in results)
        alone = all(self.writers[decl.name] == [number] for decl in results)
        return local and alone and bool(read) and all(reader in readers for reader in read)


def _moved(
    uses: _Uses, index: int, of_rows: set[int], selected: Insertions, normed: Insertions
) -> Graph:
    """The graph without the SELECT_ROWS at index ``index``, with a SELECT_ROWS for each view of
    ``selected`` and a norm of selected rows for each view of ``normed``."""
    graph = uses.graph
    select = graph.nodes[index]
    x, y = select.operands["x"], select.operands["y"]
    new = _NewGraph(graph, y.buffer)
    for number, node in enumerate(graph.nodes):
        for view in (view for view, first in selected.items() if first == number):
            new.add(select, view, {"x": view})
        for view in (view for view, first in normed.items() if first == number):
            norm = uses.norm_of(view)
            assert norm is not None
            new.add(norm, view, {"x": new.rows[norm.operands["x"]]})
        read = node.operands.items()
        if number in of_rows:
            new.of_rows(node, {name: new.rows[v] for name, v in read if v in new.rows})
        elif number != index:
            found = {name: View(x.buffer, v.columns) for name, v in read if v.buffer == y.buffer}
            new.nodes.append(_with(node, found))
    return replace(graph, buffers=MappingProxyType(new.buffers), nodes=tuple(new.nodes))


class _NewGraph:
    """The nodes and buffers of the new graph: it has all buffers of ``graph`` except ``dropped``.
    ``rows`` maps a view of all tokens to the view of its output rows."""

    def __init__(self, graph: Graph, dropped: str) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.buffers = {name: decl for name, decl in graph.buffers.items() if name != dropped}
        self.rows: dict[View, View] = {}
        self._names = {node.name for node in graph.nodes}

    def add(self, like: Node, view: View, operands: Mapping[str, View]) -> None:
        """Append a copy of ``like`` with other ``operands`` that writes the output rows of
        ``view``."""
        name = _unused(f"{view.buffer.removeprefix('scratch.')}.rows", self._names)
        self._names.add(name)
        shape = (ROWS, *self.graph.shape(view)[1:])
        buffer = _unused(f"scratch.{name}", self.buffers)
        self.buffers[buffer] = BufferDecl(buffer, BufferKind.SCRATCH, F32, shape)
        self.rows[view] = View(buffer)
        self.nodes.append(_with(replace(like, name=name), {**operands, "y": View(buffer)}))

    def of_rows(self, node: Node, operands: Mapping[str, View]) -> None:
        """Append ``node`` with some operands replaced; its results get the shape of output rows."""
        for decl in [self.buffers[view.buffer] for view in _results(node)]:
            self.buffers[decl.name] = replace(decl, shape=(ROWS, *decl.shape[1:]))
        self.nodes.append(_with(node, operands))


def _with(node: Node, operands: Mapping[str, View]) -> Node:
    """``node`` with some of its operands replaced."""
    if not operands:
        return node
    return replace(node, operands=MappingProxyType({**node.operands, **operands}))


def _results(node: Node) -> list[View]:
    written = (o.name for o in TABLE[node.opcode].operands if o.access is not Access.READ)
    return [node.operands[name] for name in written if name in node.operands]


def _unused(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "'"
    return name
