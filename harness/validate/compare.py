"""Compares two arrays under rule R0, down to the bits."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Array
from contract.ir.graph import Graph, Node
from contract.ir.scratch import concrete_shape
from contract.shape_key import ShapeKey
from harness.validate.trace import Site

NOT_FINITE = (
    "the definitions are not finite here either: the model overflows binary32, and what follows in "
    "this sequence proves nothing"
)
UNOBSERVED = "agrees when intermediate values are kept: suspect a fusion or scratch reuse"
DOWNSTREAM = "the ops before it in layers that were not traced may be the cause; use --layers all"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first result of a tier, in order of execution, that differs from the definition's.

    ``index`` is an index into ``shape``, the shape the node sees; bit patterns are hexadecimal;
    ``operands`` are (name, dtype, shape) of every operand of the node."""

    tier: str
    step: int
    node_number: int
    node: str
    opcode: str
    result: str
    buffer: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    expected: float | int
    got: float | int
    expected_bits: str
    got_bits: str
    differing: int
    elements: int
    operands: tuple[tuple[str, str, tuple[int, ...]], ...]
    note: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: order of execution."""
        return self.step, self.node_number

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        operands = ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in self.operands)
        lines = [
            f"{self.tier}: first diverging op: {self.node} ({self.opcode}), step {self.step}",
            f"  {operands}",
            f"  {self.result}{list(self.index)} is {self.got!r} (0x{self.got_bits}), "
            f"expected {self.expected!r} (0x{self.expected_bits})",
            f"  {self.differing:,} of {self.elements:,} elements of {self.buffer} differ",
        ]
        return [*lines, f"  {self.note}"] if self.note else lines


def differs(expected: Array, got: Array) -> NDArray[np.bool_]:
    """Whether each element differs (-0 equals +0) or is one that a finite model cannot give.

    A NaN or an infinity is an error of its sequence (rule R0). Weights and tokens are finite here,
    so neither can be correct, even if both sides have it."""
    unequal: NDArray[np.bool_] = expected != got
    if expected.dtype.kind == "f":
        unequal |= ~np.isfinite(expected)
    return unequal


def find_divergence(
    tier: str,
    graph: Graph,
    site: Site,
    step: int,
    key: ShapeKey,
    expected: Array,
    got: Array,
    note: str = "",
) -> Divergence | None:
    """The first differing element of one result, None when all are equal."""
    unequal = differs(expected, got)
    if not unequal.any():
        return None
    node = graph.nodes[site.node]
    index = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
    return Divergence(
        tier=tier,
        step=step,
        node_number=site.node,
        node=node.name,
        opcode=node.opcode.name,
        result=site.operand,
        buffer=site.view.buffer,
        shape=expected.shape,
        index=index,
        expected=expected[index].item(),
        got=got[index].item(),
        expected_bits=bit_pattern(expected[index]),
        got_bits=bit_pattern(got[index]),
        differing=int(np.count_nonzero(unequal)),
        elements=unequal.size,
        operands=_operands(graph, node, key),
        note=note if np.isfinite(expected[index]) else NOT_FINITE,
    )


def _operands(
    graph: Graph, node: Node, key: ShapeKey
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    found = []
    for name, view in node.operands.items():
        decl = graph.buffers[view.buffer]
        shape = tuple(map(int, view.shape(concrete_shape(decl, key))))
        found.append((name, decl.dtype.name, shape))
    return tuple(found)


def bit_pattern(value: np.generic) -> str:
    """The stored bits in hexadecimal, most significant digit first."""
    return value.tobytes()[::-1].hex()
