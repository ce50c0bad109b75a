"""Embeddings of positions, of families without rotation."""

from __future__ import annotations

from contract.dtypes import F32
from contract.ir.graph import BufferKind, View
from contract.opcodes import Opcode
from reference.model.families.emitter import Emitter
from reference.model.families.forward import embed

POSITIONS, POSITION_TABLE = "position_embd.weight", "constant.positions"
"""The embeddings in files, and in graphs."""


def embed_with_positions(e: Emitter) -> View:
    """The residual stream of the step's tokens, with the embeddings of their positions in families
    that have such: a head of ones and zeros in halves, rotated by a table that holds embeddings in
    place of cosines and sines."""
    x = embed(e)
    if not e.config.positions:
        return x
    emit, half = e.builder.emit, e.config.hidden // 2
    e.tensors.take(POSITIONS, e.config.context, e.config.hidden)
    shape = (e.limits.context, 2, half)
    table = e.builder.buffer(POSITION_TABLE, BufferKind.CONSTANT, F32, shape)
    unit = e.builder.scratch("scratch.position_unit", "tokens", 2 * half)
    zeros = emit(Opcode.SCALE, "position_zeros", x=x[0:half], factor=0.0)
    first, rest = slice(0, half), slice(half, 2 * half)
    emit(Opcode.SCALE, "position_rest", x=x[rest], factor=0.0, y=unit[rest])
    ones = e.ones("half", half)
    emit(Opcode.BIAS_ADD, "position_ones", x=zeros, bias=ones, y=unit[first])
    turned = emit(
        Opcode.ROPE, "position", x=unit, rope_table=table, query=e.query, heads=1,
        head_dim=2 * half, neox=1,
    )  # fmt: skip
    return e.add("embed_position", None, x, turned)
