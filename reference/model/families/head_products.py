"""Products of each head with a matrix of its own."""

from __future__ import annotations

from contract.dtypes import I32
from contract.ir.graph import BufferKind, View
from contract.opcodes import Opcode
from reference.model.families.emitter import Emitter, label

MATRIX_OF_HEAD = "constant.matrix_of_head"
"""The matrix of each head: 0, 1, 2 and so on."""


def head_product(
    e: Emitter,
    x: View,
    name: str,
    layer: int | None,
    shape: tuple[int, int, int],
    *,
    weight: View | None = None,
    rest: View | None = None,
    kept: int = 0,
    most: int = 0,
) -> View:
    """Emit the product of each head of x with its matrix of ``weight``, by default the tensor
    ``name``, behind the head's ``kept`` channels of ``rest``. ``shape`` is (heads, outputs, inner),
    ``most`` the largest number of heads in the graph, by default that of the layer's queries."""
    heads, outputs, _ = shape
    most = most or e.config.heads[layer or 0]
    matrix_of = e.builder.buffer(MATRIX_OF_HEAD, BufferKind.CONSTANT, I32, (most,))
    return e.builder.emit(
        Opcode.HEAD_PRODUCT,
        label(name, layer),
        x=x,
        rest=rest,
        weight=weight or e.weight(name, layer, *shape),
        matrix_of=matrix_of if heads == most else matrix_of[0:heads],
        heads=heads,
        y=e.builder.scratch(f"scratch.{label(name, layer)}", "tokens", heads * (kept + outputs)),
    )
