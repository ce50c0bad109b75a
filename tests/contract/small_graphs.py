"""Graphs of one op or two, and how the verifier has to refuse one."""

from collections.abc import Mapping

import pytest

from contract.dtypes import F32, I32, DType
from contract.errors import VerifyError
from contract.ir.graph import BufferDecl, BufferKind, Graph, Node, View
from contract.ir.verify import Rule, verify
from contract.opcodes import Opcode
from contract.spec import Dim, Scalar, Stage

K = BufferKind


def declare(*decls: BufferDecl) -> Mapping[str, BufferDecl]:
    return {decl.name: decl for decl in decls}


def buffer(
    name: str, kind: BufferKind, shape: tuple[Dim, ...] = ("tokens", 8), dtype: DType = F32
) -> BufferDecl:
    return BufferDecl(name, kind, dtype, shape)


def add(name: str, a: str | View, b: str | View, y: str | View) -> Node:
    operands = {"a": a, "b": b, "y": y}
    views = {k: v if isinstance(v, View) else View(v) for k, v in operands.items()}
    return Node(name, Opcode.ADD, views, {})


def scale(name: str, x: str, y: str, **params: Scalar) -> Node:
    return Node(name, Opcode.SCALE, {"x": View(x), "y": View(y)}, params or {"factor": 2.0})


LEFT, RIGHT, ACROSS = (0, 8), (8, 16), (7, 15)


def store(name: str, columns: tuple[int, int] = LEFT) -> Node:
    """A COPY_ROWS, the smallest op that updates in place, into columns of the table."""
    target = View("table", columns)
    operands = {"source": View("rows"), "pairs": View("pairs"), "target": target}
    return Node(name, Opcode.COPY_ROWS, operands, {})


def load(name: str, columns: tuple[int, int] = LEFT) -> Node:
    """A SELECT_ROWS of the same table into the output."""
    operands = {
        "x": View("table", columns), "output_rows": View("selected"), "y": View("loaded"),
    }  # fmt: skip
    return Node(name, Opcode.SELECT_ROWS, operands, {})


INPUT = buffer("in", K.REQUEST)
OUT = buffer("out", K.OUTPUT)
TMP = buffer("tmp", K.SCRATCH)
STORED = (buffer("rows", K.WEIGHT, (3, 8)), buffer("pairs", K.REQUEST, ("rows", 2), I32))
LOADED = (buffer("selected", K.REQUEST, ("rows",), I32), buffer("loaded", K.OUTPUT, ("rows", 8)))
TABLE_STATE = buffer("table", K.STATE, (4, 16))
BARRIER = Node("fence", Opcode.BARRIER, {}, {})


def graph(*nodes: Node, buffers: tuple[BufferDecl, ...] = (INPUT, TMP, OUT)) -> Graph:
    return Graph("g", Stage.BOTH, declare(*buffers), nodes)


def rejected(bad: Graph, node: str, rule: Rule) -> str:
    """Verify ``bad``, which must fail at ``node`` with ``rule``; the detail."""
    with pytest.raises(VerifyError) as caught:
        verify(bad)
    assert (caught.value.graph, caught.value.node, caught.value.rule) == (bad.name, node, rule)
    assert "\n" not in str(caught.value)
    return caught.value.detail
