"""Rows of the opcode table: elementwise operations."""

from __future__ import annotations

from collections.abc import Mapping

from contract.opcodes import Opcode
from contract.ops.common import (
    ACTIVATION_FUNCTION,
    TANH_FLOPS,
    WRITE,
    activation,
    each,
    gated,
)
from contract.spec import Dim, OpSpec, Param, Scalar


def _one_factor_or_all(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if dims["factors"] in (1, dims["width"]):
        return None
    return f"{dims['factors']} factors for {dims['width']} columns"


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
        Opcode.SCALE_COLUMNS,
        (
            activation("x", "tokens", "width"),
            activation("factors", "factors"),
            activation("y", "tokens", "width", access=WRITE),
        ),
        (),
        rule="R0",
        formula="y = x * factors, one factor a column or one for all",
        flops=each(1, "tokens", "width"),
        constraint=_one_factor_or_all,
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
        (ACTIVATION_FUNCTION,),
        rule="R0 R2",
        formula="y = f(gate) * up; f is silu, gelu or sigmoid",
        flops=gated("tokens", "width"),
    ),
)
