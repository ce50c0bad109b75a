"""Rows of the opcode table: elementwise operations."""

from __future__ import annotations

from contract.opcodes import Opcode
from contract.ops.common import GELU, TANH_FLOPS, WRITE, activation, each, gated
from contract.spec import OpSpec, Param

ELEMENTWISE = (
    OpSpec(
        Opcode.ADD,
        (
            activation("a", "tokens", "width"),
            activation("b", "tokens", "width"),
            activation("y", "tokens", "width", access=WRITE),
        ),
        (),
        rule="R0",
        formula="y = a + b",
        flops=each(1, "tokens", "width"),
    ),
    OpSpec(
        Opcode.MUL,
        (
            activation("a", "tokens", "width"),
            activation("b", "tokens", "width"),
            activation("y", "tokens", "width", access=WRITE),
        ),
        (),
        rule="R0",
        formula="y = a * b",
        flops=each(1, "tokens", "width"),
    ),
    OpSpec(
        Opcode.SCALE,
        (activation("x", "tokens", "width"), activation("y", "tokens", "width", access=WRITE)),
        (Param("factor", float, "multiplies x, rounded to binary32"),),
        rule="R0",
        formula="y = x * factor",
        flops=each(1, "tokens", "width"),
    ),
    OpSpec(
        Opcode.SOFT_CAP,
        (activation("x", "rows", "width"), activation("y", "rows", "width", access=WRITE)),
        (Param("cap", float, "bound of |y|; positive", minimum=2.0**-126),),
        rule="R0 R2",
        formula="y = cap * tanh(x / cap)",
        flops=each(TANH_FLOPS + 2, "rows", "width"),
    ),
    OpSpec(
        Opcode.BIAS_ADD,
        (
            activation("x", "tokens", "width"),
            activation("bias", "width"),
            activation("y", "tokens", "width", access=WRITE),
        ),
        (),
        rule="R0",
        formula="y = x + bias",
        flops=each(1, "tokens", "width"),
    ),
    OpSpec(
        Opcode.SWIGLU,
        (
            activation("gate", "tokens", "width"),
            activation("up", "tokens", "width"),
            activation("y", "tokens", "width", access=WRITE),
        ),
        (GELU,),
        rule="R0 R2",
        formula="y = silu(gate) * up, or gelu(gate) * up",
        flops=gated("tokens", "width"),
    ),
)
